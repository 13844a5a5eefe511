"""The temporary server of a flow in its own process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from torch import nn

from dphybrid.orchestration import queueing, shown, supervised
from dphybrid.training.callbacks import EpochEnd
from dphybrid.util.stop import StopRequest
from tests.conftest import REPOSITORY
from tests.flows.servers import environment
from tests.waiting import patience, wait_until

START = """
import psutil, sys
from dphybrid.orchestration.embedded import start_server
server = start_server()
server.wait(120)
(child,) = psutil.Process().children()
print(child.pid, "prefect.server" in sys.modules, flush=True)
sys.stdin.read()
"""


def watch() -> AbstractContextManager[None]:
    return supervised.watched_flow_run(str(uuid4()), StopRequest(), every_s=0.01)


@contextmanager
def progress() -> Iterator[None]:
    with shown.shown_progress(str(uuid4())) as tell:
        tell(EpochEnd("one", 1, 2, 10, 0.5, {"loss": 0.5}, True, nn.Identity()))
        yield


@pytest.mark.parametrize("beside", [watch, progress])
def test_threads_ask_the_server_of_their_flow(
    beside: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def away(**_: object) -> None:
        asked.append(PREFECT_API_URL.value())
        raise httpx.ConnectError("no server here")

    monkeypatch.setattr(queueing, "get_client", away)
    monkeypatch.setattr(shown, "_SEND_EVERY_S", 0.01)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), beside():
        wait_until(lambda: len(asked) > 1, "the server was asked twice")
    assert set(asked) == {"http://127.0.0.1:9/api"}


def start(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", START],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment(folder),
    )


@pytest.mark.nightly
def test_the_server_ends_with_its_starter(tmp_path: Path) -> None:
    with start(tmp_path) as starter:
        pid, imported = starter.stdout.readline().split()
        assert imported == "False"  # it is not imported twice
        server = psutil.Process(int(pid))
        sockets = [c for p in (server, psutil.Process(starter.pid)) for c in p.net_connections("inet")]
        assert {c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        os.kill(starter.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_running() or server.status() == "zombie", "the server has ended", 30)


@pytest.mark.nightly
def test_a_server_that_cannot_start_is_told(tmp_path: Path) -> None:
    environment(tmp_path)  # which puts a database in place
    (tmp_path / "prefect" / "prefect.db").write_bytes(b"this is not a database")
    with start(tmp_path) as starter:
        out, err = starter.communicate(timeout=patience(60))
    assert "UserError: Prefect's temporary server does not start" in err
    assert not out
