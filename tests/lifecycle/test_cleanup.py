"""Runs are listed, shown and removed, with what only they need; what somebody still needs stays."""

import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from mlflow.tracking import MlflowClient

import dphybrid
from dphybrid.cli.main import main
from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.cleanup import plan_removal, remove
from dphybrid.run.folder import all_runs
from dphybrid.tracking.models import Registry, runs_in_use
from dphybrid.tracking.record import RecordFile
from dphybrid.util.alive import holding
from tests.commands import command, models_of, run_with, version_of

TABLE = [
    "recipe=ctr",
    "devices=cpu",
    "data.path=rows.csv",
    "data.label=y",
    "train.epochs=1",
    "model.layers=1",
]


@pytest.fixture
def rows(data_dir: Path, embedded_store: None) -> None:
    """A table, and no wait for GPUs, which would keep data that was just used."""
    random = np.random.default_rng(0)
    table = pl.DataFrame({"a": random.integers(0, 5, 90), "y": random.integers(0, 2, 90)})
    table.write_csv("rows.csv")


def long_ago(path: Path) -> None:
    os.utime(path, (0, 0))


def test_a_run_goes_with_what_only_it_needs(rows: None, data_dir: Path) -> None:
    one, same = (
        run_with(*TABLE, f"train.lr={lr}", run_name=name) for lr, name in ((0.2, "s0"), (0.1, "same"))
    )
    frame = pl.read_csv("rows.csv").with_columns(b=pl.col("a") + 1)
    dphybrid.train(frame, label="y", epochs=1, devices="cpu", run_name="framed", quiet=True)
    prepared = {run.folder.name: Path(run.page.prepared) for run in all_runs(load_settings())}
    assert prepared["s0"] == prepared["same"] != prepared["framed"]
    listed = command("runs")
    assert [line.split()[0] for line in listed.splitlines()] == ["run", "s0", "same", "framed"]
    assert "finished" in listed

    told = command("runs", "remove", "s0", "framed")
    assert "s0: would be removed\nframed: would be removed\n" in told
    assert "Repeat the command with --yes" in told
    assert (data_dir / "runs" / "s0").is_dir()
    assert "s0: removed" in command("runs", "remove", "s0", "framed", "--yes")
    assert [path.name for path in (data_dir / "runs").iterdir()] == ["same"]
    assert prepared["framed"].is_dir(), "just used: a run that begins may have chosen it"
    frames = list((data_dir / "frames").iterdir())
    for path in (*(data_dir / "prepared").iterdir(), *frames):
        long_ago(path)
    told = command("runs", "remove", "--older-than", "9")
    for path in (prepared["framed"], *frames):
        assert f"{path}: would be removed, no run needs it" in told
    assert f"{prepared['same']}" not in told, "a run that stays needs it"
    command("runs", "remove", "--older-than", "9", "--yes")
    assert list((data_dir / "prepared").iterdir()) == [prepared["same"]]
    assert list((data_dir / "frames").iterdir()) == []
    client = MlflowClient(one.tracking_uri)
    for report, stage, models in ((one, "deleted", 0), (same, "active", 1)):
        assert client.get_run(report.run_id).info.lifecycle_stage == stage
        assert (len(models_of(report)) > 0) == (models > 0)
    dphybrid.load("same").predict(frame)

    command(
        "prepare", "--recipe", "ctr", "--data.path", "rows.csv", "--data.label", "y", "--data.min-count", "3"
    )
    long_ago(new := max((data_dir / "prepared").iterdir(), key=lambda path: path.stat().st_mtime))
    command("runs", "remove", "--older-than", "0", "--yes")
    assert list((data_dir / "runs").iterdir()) == []
    assert command("runs").startswith("No runs in ")
    assert not new.exists(), "no run has ever used it"
    assert Path("rows.csv").exists()


def test_what_is_in_use_stays(rows: None, data_dir: Path) -> None:
    reports = [
        run_with(*TABLE, f"train.epochs={n}", "checkpoint.register_as=m", run_name=f"v{n}") for n in (1, 2, 3)
    ]
    registry = Registry(reports[0].tracking_uri)
    registry.decide(version_of(registry, "m", "2"), "promoted: better")
    assert runs_in_use(registry.uri) == {
        reports[1].run_id: "version 2 of its model is m@champion",
        reports[2].run_id: "version 3 of its model is m@challenger",
    }
    with holding(data_dir / "runs" / "v1"):
        removal = plan_removal(load_settings(), older_than_days=0)
    assert removal.runs == []
    assert removal.kept["v1"] == "it is running"
    stays = "v2: stays, version 2 of its model is m@champion"
    assert stays in command("runs", "remove", "v2", "--yes", ends=1)
    meanwhile = plan_removal(load_settings(), older_than_days=0)
    command("runs", "remove", "--older-than", "0", "--yes")
    runs_dir = data_dir / "runs"
    assert sorted(path.name for path in runs_dir.iterdir()) == ["v2", "v3"]
    assert list(remove(meanwhile, load_settings())) == [f"{runs_dir / 'v1'}: was removed meanwhile"]
    dphybrid.load("models:/m@champion")


def test_data_that_a_run_extends_stays_as_long_as_the_run(rows: None, data_dir: Path) -> None:
    first = run_with(*TABLE, run_name="first")
    more = pl.read_csv("rows.csv")
    pl.concat([more, more.with_columns(y=1 - pl.col("y"), a=pl.col("a") + 9)]).write_csv("rows.csv")
    (base,) = (data_dir / "prepared").iterdir()
    warm = [f"data.base={base}", f"train.warm_start={first.best_checkpoint}"]
    run_with(*TABLE, *warm, run_name="second")
    command("runs", "remove", "first", "--yes")
    for folder in (data_dir / "prepared").iterdir():
        long_ago(folder)
    command("runs", "remove", "--older-than", "9", "--yes")
    assert base.is_dir()
    command("runs", "remove", "second", "--yes")
    command("runs", "remove", "--older-than", "9", "--yes")
    assert list((data_dir / "prepared").iterdir()) == []


@pytest.mark.usefixtures("unrecorded")
def test_wrong_words_and_damaged_runs_are_told(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with("recipe=toy", "devices=cpu", run_name="mine")
    for words, told in (
        (["remove"], "name the runs, or give --older-than DAYS"),
        (["remove", "mime"], "mime: there is no such run; did you mean 'mine'"),
        (["remove", "--older-than", "-1"], "--older-than '-1': must be greater than or equal to 0"),
        (["remove", "--older-than", "1e9"], "--older-than '1e9': must be less than or equal to 36500"),
        (["list", "mine"], "takes no names"),
        (["list", "--yes"], "only for `dphybrid runs remove`"),
    ):
        assert told in command("runs", *words, ends=2)
    (data_dir / "runs" / "hurt").mkdir()
    (data_dir / "runs" / "hurt" / "run.json").write_text("{")
    assert "hurt: its run.json cannot be read" in command("runs", "remove", "hurt", "--yes", ends=2)
    (data_dir / "runs" / "mine" / "report.json").write_text("{")
    assert main(["runs"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1].split()[:3] == ["mine", "toy", "unreadable"]
    assert "mine/report.json: cannot be read as JSON" in told.err
    assert "left out a run: " in told.err
    assert "mine: removed" in command("runs", "remove", "mine", "--yes")


def test_a_run_whose_server_cannot_be_asked_stays(embedded_store: None, data_dir: Path) -> None:
    run_with("recipe=toy", "devices=cpu", run_name="mine")
    record = data_dir / "runs" / "mine" / "record.jsonl"
    for noted, told in (
        ("http://127.0.0.1:9", "does not answer"),
        (f"sqlite:///{data_dir}/gone.db", "there is no such database"),
        ("postgresql://me:***@db/mlflow", "set MLFLOW_TRACKING_URI to postgresql"),
    ):
        record.unlink()
        file = RecordFile(record.parent)
        file.append({"op": "run", "run_id": "7", "experiment_id": "1", "tracking_uri": noted})
        file.close()
        assert told in plan_removal(load_settings(), ["mine"]).kept["mine"]
        assert "mine: stays" in command("runs", "remove", "mine", "--yes", ends=1)
