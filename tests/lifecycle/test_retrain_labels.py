"""Retraining with a class as label; the champion's own values and registry."""

from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import numpy as np
import polars as pl
import pytest

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle import champion as deciding
from dphybrid.lifecycle import retrain
from dphybrid.lifecycle.champion import Decision, judge, open_registry
from dphybrid.lifecycle.retrain import plan_retraining, stopped_retraining
from dphybrid.recipes.configs import build_config, load_config
from dphybrid.run.job import run_job
from dphybrid.tracking.models import Version
from dphybrid.tracking.record import RecordFile
from tests.commands import run_with
from tests.refusing import refused


def day(number: int, shops: range) -> pl.DataFrame:
    """Rows of a day: the class follows from the shop."""
    random = np.random.default_rng(number)
    shop = random.integers(shops.start, shops.stop, 400)
    return pl.DataFrame(
        {
            "shop": [f"s{n}" for n in shop],
            "weather": random.normal(size=400),  # no two rows are the same
            "kind": [("red", "green", "blue")[n % 3] for n in shop],
        }
    )


@pytest.fixture
def days(tmp_path: Path) -> Path:
    (tmp_path / "days").mkdir()
    return tmp_path / "days"


def retrained(days: Path) -> Decision:
    config = build_config(
        {
            "recipe": "ctr",
            "devices": "cpu*2",
            "data": {"path": str(days), "label": "kind"},
            "model": {"dim": 4, "hidden": 16, "layers": 1, "dropout": 0.0},
            "table": {"lr": 0.2},
            "train": {"epochs": 2, "batch_size": 50, "lr": 0.02},
            "checkpoint": {"register_as": "kind"},
        }
    )
    planned = plan_retraining(config, load_settings())
    assert not planned.stop
    report = run_job(planned.config, load_settings())
    return judge(load_settings().runs_dir / report.run_name, load_settings())


@pytest.mark.parametrize("place", ["none", "files"])
def test_retraining_needs_a_registry(place: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", place)
    with refused(f"needs MLflow's model registry, and the tracking URI is {place}; name a server"):
        open_registry(load_settings())


@pytest.mark.slow
def test_the_better_challenger_is_promoted(
    days: Path, data_dir: Path, embedded_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphybrid.lifecycle.champion._NUM_RESAMPLES", 50)
    day(1, range(6)).write_parquet(days / "day-1.parquet")
    assert retrained(days).promoted
    day(2, range(3, 12)).write_parquet(days / "day-2.parquet")  # of six shops the champion knows nothing
    better = retrained(days)
    assert better.promoted
    champion = open_registry(load_settings()).champion("kind")
    assert champion.number == "2"
    assert champion.decision.startswith("promoted: better: validation accuracy ")
    day(4, range(6)).with_columns(kind=pl.lit("pink")).write_parquet(days / "day-4.parquet")
    with refused("'pink' is not one of the model's classes, 'blue', 'green', 'red'"):
        retrained(days)


@pytest.mark.usefixtures("unrecorded")
def test_a_champion_of_another_registry_is_not_mistaken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = rows_of(tmp_path, monkeypatch)
    config = load_config(None, [*values, "checkpoint.register_as=clicks"])
    for seed in (1, 2):
        checkpoint = champion_of(monkeypatch, *values, f"train.seed={seed}")
        kept = retrain.plan_retraining(config, load_settings()).config.train.warm_start
        assert (Path(kept) / "state.json").read_bytes() == (checkpoint / "state.json").read_bytes()


def rows_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(folder)
    Path("rows.csv").write_text("a,y\n" + "".join(f"{n % 7},{n % 2}\n" for n in range(80)))
    columns = ["data.path=rows.csv", "data.label=y", "data.numeric=a"]
    return [*columns, "train.epochs=1", "devices=cpu"]


def champion_of(monkeypatch: pytest.MonkeyPatch, *values: str) -> Path:
    """Train, and let the registry's champion be this run; return its checkpoint."""
    checkpoint = Path(run_with(*values).best_checkpoint)
    champion = Version("clicks", "1", uuid4().hex, {}, "promoted")
    registry = SimpleNamespace(uri="", newest=lambda _: champion, champion=lambda _: champion)
    monkeypatch.setattr(retrain, "open_registry", lambda _: registry)
    monkeypatch.setattr(deciding, "checkpoint_folder", lambda *_: checkpoint)
    return checkpoint


@pytest.mark.parametrize(("status", "goes_on"), [("RUNNING", True), ("KILLED", True), ("FAILED", False)])
def test_a_retraining_that_failed_is_not_continued_by_the_next_one(
    status: str, goes_on: bool, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_dir / "runs" / "night"
    folder.mkdir(parents=True)
    record = RecordFile(folder)
    for each in ("RUNNING", status):
        record.append({"op": "status", "status": each})
    record.close()
    config = build_config({"recipe": "ctr", "data": {"label": "y"}, "checkpoint": {"register_as": "m"}})
    run = SimpleNamespace(status="stopped", folder=folder, config=config, page=SimpleNamespace(prepared=""))
    monkeypatch.setattr(retrain, "retrainings", lambda *_: [run])
    monkeypatch.setattr(retrain.Experiment, "open", lambda *_: SimpleNamespace(config=config))
    assert (stopped_retraining(config, load_settings()) is run) == goes_on
