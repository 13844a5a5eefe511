"""The temporary server of a flow in its own process."""

import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from dphybrid.orchestration import queueing, supervised
from dphybrid.util.stop import StopRequest
from tests.conftest import REPOSITORY
from tests.flows.servers import environment
from tests.waiting import wait_until


def test_threads_ask_the_server_of_their_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def away(**_: object) -> None:
        asked.append(PREFECT_API_URL.value())
        raise httpx.ConnectError("no server here")

    monkeypatch.setattr(queueing, "get_client", away)
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        supervised.watched_flow_run(str(uuid4()), StopRequest(), every_s=0.01),
    ):
        wait_until(lambda: len(asked) > 1, "the server was asked twice")
    assert set(asked) == {"http://127.0.0.1:9/api"}


def test_a_process_that_ends_with_its_parent_ends_when_that_is_killed() -> None:
    code = (
        "import subprocess, time; from dphybrid.orchestration.embedded import _end_with_parent; "
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=_end_with_parent); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPOSITORY) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(
        lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child has ended", 30
    )


@pytest.mark.nightly
def test_a_server_that_cannot_start_is_told(tmp_path: Path) -> None:
    env = environment(tmp_path)  # which puts a database in place
    (tmp_path / "prefect" / "prefect.db").write_bytes(b"this is not a database")
    flow = [sys.executable, "-m", "flows.train_hybrid", "--recipe", "toy", "--devices", "cpu"]
    done = subprocess.run(flow, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=env)
    assert done.returncode == 2
    assert "error: Prefect's temporary server does not start" in done.stderr
