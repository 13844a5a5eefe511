"""When a real tracking server goes away, training goes on and the record is whole afterwards."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.job import run_job
from dphybrid.tracking import open_tracker
from dphybrid.tracking.record import waits
from tests.commands import command, run_with
from tests.refusing import refused
from tests.tracking.conftest import MlflowServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
RUN = ["recipe=hybrid", "devices=cpu*2", "train.log_every=5", "train.patience=0"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("server")
    server = MlflowServer(folder, f"sqlite:///{folder}/mlflow.db")
    yield server
    server.kill()


@pytest.fixture
def server(
    running: MlflowServer, data_dir: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> MlflowServer:
    """The server of this file, where runs are recorded in an experiment of the test's own."""
    if not running.is_alive:
        running.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", running.uri)
    monkeypatch.setenv("DPHYBRID_EXPERIMENT", request.node.name)
    return running


def history(client: MlflowClient, run_id: str, key: str) -> list[int]:
    return sorted(point.step for point in client.get_metric_history(run_id, key))


def test_a_server_that_dies_in_mid_run_has_every_point_once(server: MlflowServer, tmp_path: Path) -> None:
    tracker = open_tracker(server.uri, "outage", tmp_path / "store")
    run_id = tracker.start(
        "run", {f"section.param_{i}": str(i) for i in range(1000)}, {"odd (tag)": "x"}, "note"
    )
    folder = tmp_path / "store" / "runs" / "run"
    wait_until(lambda: not waits(folder), "the first lines arrive", 60)
    for step in range(300):
        if step == 100:
            server.kill()
        if step == 200:
            time.sleep(1)  # without a server
            threading.Thread(target=server.start).start()
        tracker.log_metrics(
            {"train/loss": 1 / (step + 1), "odd (name)": float(step), "train/nan": float("nan")},
            step,  # a call to a dead server takes minutes by default: more than a test may take
        )
        if step % 50 == 0:
            (folder / f"note-{step}.txt").write_text("text")
            tracker.log_file(f"note-{step}.txt")
        time.sleep(0.01)
    wait_until(lambda: not waits(folder), "the lines of the outage arrive", 120)
    tracker.finish("FINISHED")
    client = MlflowClient(server.uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert len(run.data.params) == 1000
    names = [name for name in run.data.metrics if name.startswith("odd")]
    for key in ("train/loss", "train/nan", *names):
        assert history(client, run_id, key) == list(range(300))
    assert len(names) == 1
    found = {item.path for item in client.list_artifacts(run_id)}
    assert found == {f"note-{step}.txt" for step in range(0, 300, 50)}
    assert not waits(folder)


@pytest.mark.nightly
def test_training_ends_without_its_server_and_sync_completes_the_run(
    server: MlflowServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_FINISH_WAIT_S", "_CLOSE_WAIT_S"):
        monkeypatch.setattr(f"dphybrid.tracking.tracker.{name}", 0.5)
    from dphybrid.training import loop

    evaluated = loop.end_of_epoch

    def with_a_death(session: Any, seen: Any) -> str:
        if session.trained.progress.epoch == 1:
            server.kill()
        return evaluated(session, seen)

    monkeypatch.setattr(loop, "end_of_epoch", with_a_death)
    report = run_with(*RUN, "train.epochs=3", "checkpoint.register_as=hybrid")
    assert report.metrics["mse"] < 1
    assert "`dphybrid sync` copies it" in capsys.readouterr().out
    assert f"{report.run_name}: MLflow lacks the rest" in command("sync", "--wait", "1", ends=1)
    server.start()
    assert f"{report.run_name}: everything copied" in command("sync", "--wait", "120")
    assert "Nothing to do" in command("sync", "--wait", "120")
    client = MlflowClient(server.uri)
    run = client.get_run(report.run_id)
    assert run.info.status == "FINISHED"
    assert history(client, report.run_id, "train/loss") == list(range(5, 475, 5))
    assert history(client, report.run_id, "valid/mse") == [157, 314, 471]
    assert "**Split**" in run.data.tags["mlflow.note.content"]
    assert {item.path for item in client.list_artifacts(report.run_id)} == {"Report.html", "splits.txt"}
    models = client.search_logged_models([run.info.experiment_id])
    assert sorted(model.tags["dphybrid.step"] for model in models) == ["314", "471"]
    assert client.get_model_version_by_alias("hybrid", "champion").version == "1"


@pytest.mark.nightly
def test_a_killed_run_that_resumes_with_other_values_is_another_run(
    server: MlflowServer, request: pytest.FixtureRequest
) -> None:
    words = ["train", "--tracking", server.uri, "--recipe", "hybrid", "--train.epochs", "40"]
    words += ["--train.log-every", "10", "--checkpoint.every-steps", "50", "--train.patience", "0"]
    client = MlflowClient(server.uri)
    child = subprocess.Popen([sys.executable, "-m", "dphybrid", *words], stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if "epoch 1/40" in line:
            child.send_signal(signal.SIGKILL)
            break
    child.wait()
    experiment = client.get_experiment_by_name(request.node.name)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "RUNNING"  # an orphan
    assert f"{run.info.run_name}: its process no longer exists; ended as KILLED" in command("sync")
    assert client.get_run(run.info.run_id).info.status == "KILLED"
    words[words.index("--train.epochs") + 1] = "3"
    command(*words, "--resume", "--devices", "cpu")
    (other,) = [
        one for one in client.search_runs([experiment.experiment_id]) if one.info.run_id != run.info.run_id
    ]
    assert other.info.status == "FINISHED"
    assert other.data.tags["dphybrid.attempt"] == "2"
    assert other.data.tags["dphybrid.continues"] == run.info.run_id
    assert other.data.params["train.epochs"] == "3"
    steps = history(client, other.info.run_id, "train/loss")
    assert steps == list(range(min(steps), 480, 10))
    assert set(steps) | set(history(client, run.info.run_id, "train/loss")) >= set(range(10, 480, 10))


@pytest.mark.nightly
def test_a_large_checkpoint_is_recorded_by_path_and_still_loads(
    server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dphybrid.serving.load import model_from_checkpoint
    from dphybrid.tracking.loader import checkpoint_folder

    monkeypatch.setattr("dphybrid.tracking.models.UPLOAD_LIMIT", 2**20)
    config = load_config(
        None, ["recipe=hybrid", "model.dim=400", "train.epochs=1", "checkpoint.register_as=wide"]
    )
    report = run_job(config, load_settings())
    client = MlflowClient(server.uri)
    version = client.get_model_version_by_alias("wide", "challenger")
    table = next((Path(report.best_checkpoint) / "tables").glob("*.safetensors"))
    assert table.stat().st_size > 2**20
    artifacts = server.folder / "artifacts" / client.get_run(report.run_id).info.experiment_id
    assert list(artifacts.rglob("state.json"))
    assert not list(artifacts.rglob(table.name))
    folder = checkpoint_folder("models:/wide@challenger", server.uri)
    with refused(r"models:/wide@nobody: cannot be fetched"):
        checkpoint_folder("models:/wide@nobody", server.uri)
    assert folder == Path(report.best_checkpoint)
    one, two = model_from_checkpoint(folder), model_from_checkpoint(report.best_checkpoint)
    assert all(value.equal(two.state_dict()[key]) for key, value in one.state_dict().items())
    table.write_bytes(b"other")
    with refused(r"checksum differs"):
        model_from_checkpoint(checkpoint_folder(f"models:/wide/{version.version}", server.uri))
