"""What MLflow lacks of a record is told where people look, and copied later."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.config.own_runs import enter
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.job import run_job
from dphybrid.tracking import open_tracker
from dphybrid.tracking.models import Registry
from dphybrid.tracking.record import RecordFile, destination, of_metrics, waits
from dphybrid.tracking.sync import sync
from dphybrid.util.locks import is_held, take
from tests.commands import command
from tests.stores import put_database
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dphybrid.tracking.copier._REFUSED_RETRIES_S", (0.01, 0.02))
    monkeypatch.setattr("dphybrid.tracking.copier._FIRST_RETRY_S", 0.05)
    monkeypatch.setattr("dphybrid.tracking.copier._LAST_RETRY_S", 0.2)


def card(folder: Path, step: int = 1) -> dict[str, Any]:
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text('{"sha256": {}}')
    metrics = {"valid/auc": 0.5 * step}
    names = {"uid": f"uid-{step}", "name": path.name, "role": "best"}
    return names | {"step": step, "folder": path, "metrics": metrics}


def test_a_checkpoint_removed_before_it_was_sent_takes_no_point_with_it(tmp_path: Path) -> None:
    tracker = open_tracker(None, "late", tmp_path / "store")
    run_id = tracker.start("run", {}, {}, "")
    tracker.close()
    held = take(tmp_path / "store" / "runs" / "run" / "record.jsonl")  # nobody sends meanwhile
    assert held is not None
    tracker.attach("run")
    for step in (1, 2):
        tracker.log_metrics({"valid/auc": 0.5 * step}, step)
        kept = card(tmp_path / "store" / "runs" / "run", step)
        tracker.log_checkpoints([kept])
        if step == 1:
            shutil.rmtree(kept["folder"])
    os.close(held)
    tracker.finish("FINISHED")
    client = MlflowClient(tracker.tracking_uri)
    assert [(p.step, p.value) for p in client.get_metric_history(run_id, "valid/auc")] == [(1, 0.5), (2, 1.0)]
    run = client.get_run(run_id)
    (model,) = client.search_logged_models([run.info.experiment_id])
    assert [(m.key, m.step, m.value) for m in model.metrics] == [("valid/auc", 2, 1.0)]
    assert run.info.status == "FINISHED"


def test_any_name_registers_again_and_again(tmp_path: Path) -> None:
    names = ["100%_sure", "100-_sure", "naïve größe"]
    for number in (1, 2):
        tracker = open_tracker(None, "names", tmp_path)
        tracker.start(f"run-{number}", {}, {"dphybrid.recipe": "ctr"}, "")
        tracker.log_metrics({"valid/auc": 0.5}, 1)
        tracker.log_checkpoints([card(tmp_path / "runs" / f"run-{number}")])
        assert [tracker.register(name, "uid-1", "challenger") for name in names] == [""] * len(names)
        tracker.finish("FINISHED")
    registry = Registry(tracker.tracking_uri)
    for name in names:
        newest, champion = registry.newest(name), registry.champion(name)
        assert (newest.number, champion.number) == ("2", "1")
    client = MlflowClient(tracker.tracking_uri)
    assert client.get_registered_model("100%_sure").tags == {"dphybrid.recipe": "ctr"}


def test_a_first_version_is_the_champion_even_if_its_registration_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_alias, calls = MlflowClient.set_registered_model_alias, list[str]()

    def fails_once(self: MlflowClient, name: str, alias: str, version: str) -> None:
        calls.append(alias)
        if len(calls) == 1:
            raise ConnectionError("the server went away")
        set_alias(self, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", fails_once)
    tracker = open_tracker(None, "interrupted", tmp_path)
    tracker.start("run", {}, {"dphybrid.recipe": "ctr"}, "")
    tracker.log_metrics({"valid/auc": 0.5}, 1)
    tracker.log_checkpoints([card(tmp_path / "runs" / "run")])
    assert tracker.register("clicks", "uid-1", "challenger") == ""
    registry = Registry(tracker.tracking_uri)
    champion = registry.champion("clicks")
    assert champion is not None
    registry.decide(champion, "kept: worse")
    assert tracker.register("clicks", "uid-1", "challenger") == ""  # as a resumed run does
    assert registry.champion("clicks") is None
    tracker.finish("FINISHED")


def test_a_registration_that_fails_is_told_and_not_reported_as_done(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    def refuse(*_: object, **__: object) -> None:
        raise MlflowException("no more versions", error_code=INVALID_PARAMETER_VALUE)

    config = load_config(None, ["recipe=toy", "checkpoint.register_as=clicks"])
    with monkeypatch.context() as refusing:
        refusing.setattr(MlflowClient, "create_model_version", refuse)
        report = run_job(config, load_settings())
    assert report.registered_as == ""
    assert report.not_registered == "clicks: no more versions"
    assert "NOT registered as clicks: no more versions" in report.text
    assert "Registered:" not in report.text
    client = MlflowClient(report.tracking_uri)
    note = client.get_run(report.run_id).data.tags["mlflow.note.content"]
    assert "- **NOT registered as clicks**: no more versions" in note
    assert "models:/clicks@challenger" not in note
    assert "MLflow lacks 1 line of the record (no more versions)" in capsys.readouterr().out
    assert "Nothing to do" in command("sync")


def unsent(store: Path, runs: Path, name: str) -> tuple[str, RecordFile]:
    """A run whose process ended before MLflow got five points and its end."""
    tracker = open_tracker(None, "dphybrid", store, runs=runs)
    run_id = tracker.start(name, {}, {}, name)
    tracker.close()
    record = RecordFile(runs / name)
    for step in range(5):
        record.append(of_metrics({"train/loss": 1.0 / (step + 1)}, step))
    record.append({"op": "status", "status": "FINISHED"})
    record.close()
    (record.folder / "run.json").write_text(json.dumps({"uid": enter(record.folder)}))
    return run_id, record


def test_sync_tells_of_damage_with_its_exit_code_and_copies_the_others(data_dir: Path) -> None:
    settings = load_settings()
    made = {
        name: unsent(settings.mlflow_dir, settings.runs_dir, name)
        for name in ("damaged", "good", "unreadable")
    }
    ids = {name: run_id for name, (run_id, _) in made.items()}
    _, damaged = made["damaged"]
    lines = damaged.path.read_bytes().splitlines(keepends=True)
    lines[-3] = lines[-3].replace(b":0.25", b":")
    damaged.path.write_bytes(b"".join(lines))
    (settings.runs_dir / "unreadable" / "record.sent").unlink()
    (settings.runs_dir / "unreadable" / "record.sent").mkdir()
    out = command("sync", "--wait", "2", ends=1)
    assert "damaged: MLflow lacks 1 line of the record (damaged)" in out
    assert "good: everything copied" in out
    assert "unreadable: MLflow lacks the rest of the record (" in out
    client = MlflowClient(f"sqlite:///{settings.mlflow_dir}/mlflow.db")
    for name, steps in (("damaged", [0, 1, 2, 4]), ("good", [0, 1, 2, 3, 4])):
        assert [p.step for p in client.get_metric_history(ids[name], "train/loss")] == steps
    (settings.runs_dir / "unreadable" / "record.sent").rmdir()
    assert "unreadable: everything copied" in command("sync")
    assert "Nothing to do" in command("sync")


def test_a_moved_data_folder_sends_its_records_and_checkpoints(data_dir: Path, tmp_path: Path) -> None:
    settings = load_settings()
    run_id, record = unsent(settings.mlflow_dir, settings.runs_dir, "run")
    tracker = open_tracker("files", "", settings.mlflow_dir, runs=settings.runs_dir)
    tracker.attach("run")
    (record.folder / "a.txt").write_text("text")
    tracker.log_file("a.txt")
    tracker.log_checkpoints([card(record.folder / "checkpoints")])
    tracker.close()
    settings.runs_dir.rename(tmp_path / "moved")
    lines = list(sync((tmp_path / "moved").iterdir(), settings.mlflow_dir, None))
    assert lines[-1] == ("run: everything copied", True)
    client = MlflowClient(f"sqlite:///{settings.mlflow_dir}/mlflow.db")
    names = {item.path for item in client.list_artifacts(run_id)}
    assert names == {"a.txt"}
    assert len(client.search_logged_models([client.get_run(run_id).info.experiment_id])) == 1


def test_sync_makes_no_database_and_takes_no_other_record_for_one(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Nothing to do" in command("sync")
    assert not list(data_dir.rglob("mlflow.db"))
    for place in ("none", "files"):
        monkeypatch.setenv("DPHYBRID_TRACKING_URI", place)
        assert f"the tracking URI is {place}, so no run is recorded in MLflow" in command("sync", ends=2)


def test_records_whose_run_is_not_at_the_server_are_kept(data_dir: Path) -> None:
    settings = load_settings()
    _, record = unsent(settings.mlflow_dir, settings.runs_dir, "run")
    put_database("mlflow", data_dir / "other.db")
    there = destination(record.folder)
    record.path.write_text(record.path.read_text().replace("embedded", f"sqlite:///{data_dir}/other.db"))
    (record.folder / "record.sent").unlink()
    out = command("sync", "--wait", "2", ends=1)
    assert f"MLflow lacks the rest of the record (run {there['run_id']} does not exist at the tracking" in out
    assert waits(record.folder)


def test_a_run_deleted_in_mlflow_is_said_once_and_loses_no_record(
    data_dir: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = open_tracker(None, "dphybrid", load_settings().mlflow_dir)
    run_id = tracker.start("run", {}, {}, "")
    tracker.log_metrics({"train/loss": 1.0}, 0)
    folder = load_settings().mlflow_dir / "runs" / "run"
    wait_until(lambda: not waits(folder), "the first lines arrive", every_s=0.02)
    client = MlflowClient(tracker.tracking_uri)
    client.delete_run(run_id)
    for step in range(1, 301):
        tracker.log_metrics({"train/loss": 1.0}, step)
        if step % 100 == 0:
            (folder / f"{step}.txt").write_text("text")
            tracker.log_file(f"{step}.txt")
            time.sleep(0.4)
            assert waits(folder)
    tracker.close()
    deleted = f"run {run_id} was deleted at the tracking server; `mlflow runs restore` brings it back"
    assert [deleted in record.message for record in caplog.records] == [True]
    tracker.attach("run")
    client.restore_run(run_id)
    tracker.finish("FINISHED")
    assert "lacks" not in capsys.readouterr().out
    assert [p.step for p in client.get_metric_history(run_id, "train/loss")] == list(range(301))
    assert len(client.list_artifacts(run_id)) == 3


def test_a_file_that_is_gone_when_it_is_sent_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = open_tracker(None, "damage", tmp_path)
    run_id = tracker.start("run", {}, {}, "note")
    tracker.close()
    folder = tmp_path / "runs" / "run"
    (folder / "gone.txt").touch()
    record = RecordFile(folder)
    record.append({"op": "file", "path": "gone.txt"})
    record.close()
    (folder / "gone.txt").unlink()
    tracker.attach("run")
    assert not is_held(record.path)  # who attaches, to ask for an address alone, copies nothing yet
    tracker.finish("FINISHED")
    assert MlflowClient(tracker.tracking_uri).get_run(run_id).info.status == "FINISHED"
    assert "gone.txt: no longer exists" in capsys.readouterr().out
