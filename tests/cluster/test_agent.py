"""An agent of torchrun's, and what becomes of its ranks; these compute nothing, and need no TorchRec."""

from pathlib import Path

import psutil
import pytest

from dphybrid.cluster.launch import Meeting, agent_environment, run_agent
from dphybrid.util.stop import StopRequest
from tests.conftest import REPOSITORY
from tests.waiting import wait_until

RANK = "tests.cluster.patient"


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def agent_here() -> psutil.Process:
    (agent,) = [child for child in psutil.Process().children() if "torch.distributed.run" in child.cmdline()]
    return agent


@pytest.mark.slow
def test_a_request_reaches_the_rank_whose_lines_are_this_processes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    stop = StopRequest()

    def look() -> None:
        if (tmp_path / "begun").exists():
            stop.ask("a test")

    meeting = Meeting("the-job", look=look)
    assert run_agent(1, (RANK, str(tmp_path)), tmp_path, agent_environment({}), 0, stop, meeting) == 0
    assert "asked by a test" in capsys.readouterr().out
    assert not list(tmp_path.glob(".stop*"))


@pytest.mark.slow
def test_ranks_of_a_killed_agent_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    environment = agent_environment({})

    def look() -> None:
        if (tmp_path / "begun").exists():
            agent_here().kill()

    meeting = Meeting("the-job", look=look)
    assert run_agent(1, (RANK, str(tmp_path)), tmp_path, environment, 0, StopRequest(), meeting) == -9
    rank = int((tmp_path / "begun").read_text())
    wait_until(lambda: not is_running(rank), "the rank ends", 5)
