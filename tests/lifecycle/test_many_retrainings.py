"""Nothing grows without end where a model is retrained each hour: processes, files, bytes and rows of MLflow
are the same after half of the retrainings and after all, with docs/workstation.md's clean-up."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pytest

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.champion import decide_waiting, judge
from dphybrid.lifecycle.retrain import plan_retraining, retraining
from dphybrid.recipes.configs import load_config
from dphybrid.run.folder import CHAMPION_TAG
from dphybrid.run.job import run_job
from dphybrid.util.stop import StopRequest
from tests.commands import command
from tests.stores import put_database

COUNT = 6
KEPT_BY_MLFLOW = ("rows of datasets", "rows of inputs", "rows of input_tags")
"""`mlflow gc` does not remove what it knows of a removed run's data: a few short rows a retraining."""


def retrain(values: list[str]) -> None:
    """Retrain once, as the flow does, and print the decision."""
    config, settings = load_config(None, values), load_settings()
    with retraining("clicks", settings, StopRequest()):
        assert list(decide_waiting(settings, "clicks")) == []
        planned = plan_retraining(config, settings)
        assert not planned.stop, planned.stop
        report = run_job(planned.config, settings, tags={CHAMPION_TAG: planned.champion or "none"})
        print(judge(settings.runs_dir / report.run_name, settings).why)


def write_hour(folder: Path, hour: int) -> None:
    """Write the rows of an hour, and remove those of the hours before the last two."""
    random = np.random.default_rng(hour)
    shop = random.integers(0, 20, 400)
    buys = random.random(400) < np.where(shop % 2, 0.8, 0.2)
    table = pl.DataFrame(
        {"shop": [f"s{n}" for n in shop], "age": random.normal(size=400), "buys": buys.astype(int)}
    )
    table.write_csv(folder / f"{hour:03d}.csv")
    (folder / f"{hour - 3:03d}.csv").unlink(missing_ok=True)


def collect_garbage(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty MLflow's trash, as its administrator does."""
    from mlflow.cli import gc  # takes a second

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    gc.main(["--backend-store-uri", f"sqlite:///{database}"], standalone_mode=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


def running_children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def measure(
    data_dir: Path, database: Path, artifacts: Path, scratch: Path, others: set[int]
) -> dict[str, int]:
    """Count what could grow. bytes: of all files, each once, without the databases' free pages. others:
    processes that earlier tests left, such as multiprocessing's server."""
    files = {
        file.stat().st_ino: file
        for root in (data_dir, artifacts, scratch)
        for file in root.rglob("*")
        if file.is_file()
    }
    counted = {"files": len(files), "runs": len(list((data_dir / "runs").iterdir()))}
    counted["processes"] = len(running_children() - others)
    counted["bytes"] = sum(file.stat().st_size for file in files.values() if file.suffix != ".db")
    counted["scratch"] = len(list(scratch.iterdir()))
    with closing(sqlite3.connect(database)) as rows:
        tables = [name for (name,) in rows.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        counted |= {
            f"rows of {name}": rows.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables
        }
    return counted


@pytest.mark.nightly
def test_as_much_is_there_after_all_retrainings_as_after_half(
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scratch, hours = tmp_path / "tmp", tmp_path / "hours"
    scratch.mkdir()
    hours.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("DPHYBRID_GPU_WAIT_S", "0")
    database = data_dir / "mlflow" / "mlflow.db"
    put_database("mlflow", database)
    values = [f"data.path={hours}", "data.label=buys", "recipe=ctr", "devices=cpu", "train.epochs=3"]
    values += [
        "checkpoint.register_as=clicks",
        "data.valid_fraction=0.3",
        "model.dim=4",
        "train.batch_size=64",
    ]
    others = running_children()
    seen = list[dict[str, int]]()
    for hour in range(1, COUNT + 1):
        write_hour(hours, hour)
        retrain(values)
        last = capsys.readouterr().out.splitlines()[-1]
        assert "validation auc" in last or last.startswith("not compared"), last
        for folder in (data_dir / "prepared").iterdir():
            os.utime(folder, (0, 0))  # hours have passed
        command("runs", "remove", "--older-than", "0", "--yes")
        if hour in (COUNT // 2, COUNT):
            collect_garbage(database, monkeypatch)
            seen.append(measure(data_dir, database, data_dir / "mlflow" / "artifacts", scratch, others))
    print("after half and all of the retrainings:", *seen, sep="\n")
    half, whole = seen
    # The champion, its predecessor and the newest challenger: up to three runs, fewer if they coincide.
    assert max(half["runs"], whole["runs"]) <= 3
    per_run = [{name: number / found["runs"] for name, number in found.items()} for found in seen]
    before, after = per_run
    grown = {name: (before[name], now) for name, now in after.items() if now > 1.3 * before[name] + 5}
    assert grown.keys() <= set(KEPT_BY_MLFLOW), grown
    for name in KEPT_BY_MLFLOW:
        assert whole[name] <= 5 * COUNT
    assert whole["processes"] == half["processes"] == 0
    assert whole["scratch"] == 0
