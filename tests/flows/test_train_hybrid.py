"""The flow as people start it: in this process without a server, and by a worker of a real server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent.parent


def environment(folder: Path, **more: str) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DPHYBRID_", "MLFLOW_"))}
    own = {
        "DPHYBRID_DATA_DIR": str(folder / "data"),
        "DPHYBRID_THREADS": "1",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "PYTHONUNBUFFERED": "1",
    }
    return base | own | more


def flow(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.train_hybrid", *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=environment(folder),
        timeout=300,
    )


@pytest.mark.slow
def test_the_flow_runs_in_this_process_and_a_second_run_reuses_the_data(tmp_path: Path) -> None:
    first = flow(tmp_path, "--recipe", "toy", "--devices", "cpu*3", "--report", str(tmp_path / "report.json"))
    assert first.returncode == 0, first.stderr
    assert "Let's use 3 devices!\n\tIn Model: input size torch.Size([10, 5]) output size torch.Size([10, 2])\n" in first.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run_id"] in first.stdout
    assert report["best_checkpoint"] in first.stdout
    assert report["ui_command"] in first.stdout
    assert Path(report["best_checkpoint"], "state.json").is_file()
    second = flow(tmp_path, "--recipe", "toy", "--devices", "cpu*8")
    assert "Reusing prepared data" in second.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--recipe", "txt"], ["recipe", "'txt'"]),
        (["--train.batch-size", "0"], ["train.batch_size"]),
        (["--nonsense"], ["--nonsense", "--help"]),
    ],
)
def test_wrong_flags_end_before_anything_starts(argv: list[str], words: list[str], tmp_path: Path) -> None:
    ended = flow(tmp_path, *argv)
    assert ended.returncode == 2
    for word in words:
        assert word in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "prefect" / "prefect.db").exists()


@pytest.mark.slow
def test_input_found_wrong_by_a_task_is_one_message_too(tmp_path: Path) -> None:
    ended = flow(tmp_path, "--data.path", "nowhere.txt")
    assert ended.returncode == 2
    assert "error: data.path=nowhere.txt: there is no such file or folder" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_checkpoints_at_once_and_resume_goes_on(tmp_path: Path) -> None:
    options = ["--model.hidden", "16", "--model.dim", "16", "--train.patience", "0"]
    argv = [sys.executable, "-m", "flows.train_hybrid", *options, "--train.epochs", "4000"]
    log = tmp_path / "log"
    with log.open("wb") as stream:
        # A session of its own, as a terminal makes one: Ctrl-C reaches every process in it, the embedded server too.
        child = subprocess.Popen(
            argv, stdout=stream, stderr=stream, env=environment(tmp_path), cwd=REPOSITORY, start_new_session=True
        )
    deadline = time.monotonic() + 120
    while b"epoch 1/4000" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.3)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(45) == 130
    shown = log.read_text()
    assert "stopped by Ctrl-C after step" in shown
    assert "Traceback" not in shown
    (folder,) = (tmp_path / "data" / "runs").iterdir()
    resumed = flow(tmp_path, *options, "--train.epochs", "3", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"Going on from {folder}" in resumed.stdout


def free_port() -> int:
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        return int(stream.getsockname()[1])


@contextmanager
def process(argv: list[str], log: Path, env: dict[str, str], cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own with its output in a file; ended with its children when the block ends."""
    with log.open("wb") as stream:
        child = subprocess.Popen(argv, stdout=stream, stderr=stream, env=env, cwd=cwd, start_new_session=True)
        try:
            yield child
        finally:
            os.killpg(child.pid, 15)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait(20)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A Prefect server, a process worker and the project's deployments; yields a function that runs prefect commands."""
    folder = tmp_path_factory.mktemp("deployed")
    port = free_port()
    env = environment(folder, PREFECT_API_URL=f"http://127.0.0.1:{port}/api")
    tool = str(Path(sys.executable).parent / "prefect")

    def prefect(*argv: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool, *argv], capture_output=True, text=True, check=False, env=env, cwd=REPOSITORY, timeout=timeout
        )

    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    with process([tool, "server", "start", "--host", "127.0.0.1", "--port", str(port)], folder / "server.log", env, elsewhere):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as stream:
                if stream.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        made = prefect("work-pool", "create", "gpu", "--type", "process")
        assert made.returncode == 0, made.stderr + (folder / "server.log").read_text()
        put = prefect("--no-prompt", "deploy", "--all")
        assert put.returncode == 0, put.stdout + put.stderr
        worker = [tool, "worker", "start", "--pool", "gpu", "--type", "process", "--limit", "1"]
        with process(worker, folder / "worker.log", env, elsewhere):
            yield prefect, folder


@pytest.mark.slow
def test_the_literal_command_runs_the_deployment_to_completion(deployed: tuple[Any, Path]) -> None:
    prefect, folder = deployed
    overrides = json.dumps(["recipe=hybrid", "devices=cpu*2", "train.epochs=2"])
    ended = prefect("deployment", "run", "train-hybrid", "--param", f"overrides={overrides}", "--watch", "--watch-timeout", "200")
    assert ended.returncode == 0, ended.stdout + ended.stderr + (folder / "worker.log").read_text()

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("dphybrid")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.deployment_name"] == "train-hybrid"
    assert "Prefect flow run" in run.data.tags["mlflow.note.content"]
    assert run.data.params["devices.replicas"] == "2"
    assert "timing/lookup_ms" in run.data.metrics
    assert "split_shapes.json" in {item.path for item in client.list_artifacts(run.info.run_id)}
    assert len(client.search_logged_models([experiment.experiment_id])) >= 1
    shown = prefect("artifact", "ls").stdout
    for key in ("mlflow-run", "metrics", "splits", "result"):
        assert key in shown


@pytest.mark.slow
def test_full_names_and_wrong_parameters(deployed: tuple[Any, Path]) -> None:
    prefect, _ = deployed
    listed = prefect("deployment", "ls").stdout
    assert "train-hybrid/train-hybrid" in listed
    wrong = prefect("deployment", "run", "train-hybrid/train-hybrid", "--param", 'config={"train": {"epochs": 0}}')
    assert wrong.returncode != 0
    assert "epochs" in wrong.stdout + wrong.stderr
    unknown = prefect("deployment", "run", "train-hybrd")
    assert unknown.returncode != 0
    assert "train-hybrd" in unknown.stdout + unknown.stderr
    schedules = prefect("deployment", "schedule", "ls", "train-hybrid/train-hybrid").stdout
    assert "False" in schedules
