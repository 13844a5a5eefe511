"""The flow as people start it in a terminal, without a server, and the temporary server that it starts."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, TaskRunFilter
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from dphybrid.orchestration import supervised
from dphybrid.run import job
from dphybrid.run.pages import Report
from dphybrid.util.stop import StopRequest
from flows import train_hybrid
from tests.commands import command
from tests.flows.servers import REPOSITORY, environment
from tests.waiting import patience, wait_until


@pytest.mark.slow
def test_the_flow_runs_without_a_server_and_reuses_prepared_data(
    tmp_path: Path, data_dir: Path, prefect_server: None, capfd: pytest.CaptureFixture[str]
) -> None:
    command("prepare", "--recipe", "toy")
    # It starts the temporary server that the fixture has started in this process.
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        argv = ["--recipe", "toy", "--devices", "cpu*3", "--run-name", "mine"]
        assert train_hybrid.main(argv) == 0
        EventsWorker.drain_all()
    out, err = capfd.readouterr()
    assert "Let's use 3 devices!\ntrain.check_split: the same results split and on one device\n" in out
    assert "\tIn Model: input size torch.Size([10, 5]) output size torch.Size([10, 2])\n" in out
    assert "Reusing prepared data" in out
    assert "Task run" not in out + err  # the flow says each step itself
    assert "does not take records" not in out + err
    report = Report.read(data_dir / "runs/mine/report.json")
    for shown in (report.run_id, report.best_checkpoint, report.ui_command):
        assert shown in out
    assert Path(report.best_checkpoint, "state.json").is_file()
    page = json.loads((data_dir / "runs/mine/run.json").read_text())
    own = UUID(page["tags"]["prefect.flow_run_id"])
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(own).state.name == "Completed"
        tasks = client.read_task_runs(task_run_filter=TaskRunFilter(flow_run_id={"any_": [own]}))
        assert [task.state.name for task in tasks] == ["Completed"] * 5
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id={"any_": [own]}))
        assert {artifact.key for artifact in found} == {"mlflow-run", "metrics", "splits", "result"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nonsense"], "--nonsense: there is no such flag"),
        (["--data.path", "nowhere.txt"], "error: data.path=nowhere.txt: there is no such file\n"),
    ],
)
def test_wrong_flags_end_before_anything_starts(
    argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_hybrid, "in_this_process", lambda: pytest.fail("a server starts"))
    with pytest.raises(SystemExit, match="2"):
        sys.exit(train_hybrid.main(argv))
    assert words in capsys.readouterr().err


def run_until_signalled(
    folder: Path, options: list[str], number: int, signalled: Callable[[int, int], None] = os.killpg
) -> tuple[int, str]:
    """Send a signal to a long run, by default to its whole process group, once it trains; return its exit
    code and output."""
    argv = [sys.executable, "-m", "flows.train_hybrid", *options, "--train.epochs", "4000"]
    log = folder / "log"
    with log.open("wb") as stream:
        # A session of its own, as a terminal makes one: a signal of the terminal reaches every process in it,
        # the temporary server too.
        child = subprocess.Popen(
            argv,
            stdout=stream,
            stderr=stream,
            env=environment(folder),
            cwd=REPOSITORY,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + patience(120)
        while b"epoch 1/4000" not in log.read_bytes():
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)
        signalled(child.pid, number)
        return child.wait(patience(60)), log.read_text()
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def servers(folder: Path) -> list[psutil.Process]:
    """The temporary servers whose database is in this folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment = process.info["environ"] or {}
        if "uvicorn" in (process.info["cmdline"] or []) and environment.get("PREFECT_HOME", "").startswith(
            str(folder)
        ):
            found.append(process)
    return found


NOISE = ("Crash detected", "Error logging to API", "EventsWorker", "Traceback", "temporary server")


def test_a_full_disk_is_told_without_a_traceback_of_its_task(
    data_dir: Path,
    prefect_server: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "splits.txt")

    monkeypatch.setattr(job, "train_run", full)
    seen = BufferingHandler(1000)
    logging.getLogger("prefect.task_runs").addHandler(seen)
    assert train_hybrid.main(["--recipe", "toy"]) == 2
    logging.getLogger("prefect.task_runs").removeHandler(seen)
    assert "splits.txt: No space left on device; make room" in capsys.readouterr().err
    assert not [record for record in seen.buffer if record.exc_info]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "signalled"),
    [(signal.SIGINT, os.killpg), (signal.SIGHUP, os.killpg), (signal.SIGTERM, os.kill)],
    ids=["Ctrl-C", "closed", "kill"],
)
def test_a_signal_ends_a_run_with_a_checkpoint_to_continue_from(
    number: int,
    signalled: Callable[[int, int], None],
    tmp_path: Path,
    data_dir: Path,
    prefect_server: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--recipe", "hybrid", "--train.patience", "0"]
    code, shown = run_until_signalled(tmp_path, options, number, signalled)
    assert code == 128 + number
    newest = max((tmp_path / "data" / "runs").glob("*/checkpoints/step-*"))
    last = shown.splitlines()[-1]
    assert "after step" in last
    assert f"--resume continues from {newest}" in last
    for noise in NOISE:
        assert noise not in shown
    assert not servers(tmp_path)
    epoch = json.loads((newest / "state.json").read_text())["progress"]["epoch"]
    assert train_hybrid.main([*options, "--train.epochs", str(epoch + 1), "--resume"]) == 0
    assert f"Resuming from {newest}" in capsys.readouterr().out


def test_threads_ask_the_server_of_their_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def away(**_: object) -> None:
        asked.append(PREFECT_API_URL.value())
        raise httpx.ConnectError("no server here")

    monkeypatch.setattr(supervised, "get_client", away)
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        supervised.watched_flow_run(str(uuid4()), StopRequest(), every_s=0.01),
    ):
        wait_until(lambda: len(asked) > 1, "the server was asked twice")
    assert set(asked) == {"http://127.0.0.1:9/api"}
