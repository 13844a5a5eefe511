"""How ranks are started, meet and end; these compute nothing, and need no TorchRec."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dphybrid.cluster.launch import OUTCOME, Outcome, rank_environment, run_ranks
from dphybrid.util.alive import process_name
from dphybrid.util.stop import StopRequest
from tests.conftest import REPOSITORY
from tests.refusing import refused
from tests.waiting import patience, wait_until

STANDIN = "tests.cluster.standin"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def ranks_here() -> list[psutil.Process]:
    """The ranks that this process has started, which have not ended."""
    below = psutil.Process().children(recursive=True)
    return [child for child in below if child.cmdline()[1:4] == ["-u", "-m", STANDIN]]


def started(folder: Path, number: int, count: int = 2) -> bool:
    """Do all ranks of a start know each other?"""
    logs = list((folder / "ranks").glob(f"*/attempt_{number}/*/stdout.log"))
    return sum("of 2" in log.read_text() for log in logs) == count - 1


def test_ranks_meet_in_their_users_folder_and_end_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, seen = StopRequest(), set[str]()

    def look() -> None:
        if not started(tmp_path, 0) or stop.pending:  # they end then
            return
        assert stat.S_IMODE((tmp_path / "ranks").stat().st_mode) == 0o700
        for process in psutil.Process().children(recursive=True):
            listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert not listening or process in ranks_here(), "their launcher listens nowhere"
            seen.update(c.laddr.ip for c in listening)
        stop.ask("a test")

    program = (STANDIN, str(tmp_path))
    assert run_ranks(2, program, tmp_path, rank_environment({}), 0, stop, look) == 0
    assert seen == {"127.0.0.1"}
    assert "rank 0 of 2" in capsys.readouterr().out, "this process prints the lines of rank 0"
    assert Outcome.read(tmp_path / OUTCOME) == Outcome(state="stopped", words="stopped by a test")
    assert not (tmp_path / "ranks" / "stop").exists()


@pytest.mark.nightly
def test_all_ranks_start_again_when_one_is_killed_and_fail_at_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    def look() -> None:
        if started(tmp_path, len(killed)):
            rank = ranks_here()[-1]
            killed.append(rank.pid)
            rank.kill()

    program = (STANDIN, str(tmp_path))
    code = run_ranks(2, program, tmp_path, rank_environment({}), 1, StopRequest(), look)
    assert code == 1
    assert len(killed) == 2
    assert "(restart 1 of 1)" in capsys.readouterr().out
    assert not ranks_here()


@pytest.mark.nightly
def test_a_rank_whose_starter_is_gone_does_not_wait_for_the_others(tmp_path: Path) -> None:
    place = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1"}
    place |= {f"TORCHELASTIC_{name}": "0" for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")}
    gone = {"DPHYBRID_CLUSTER_STARTER": process_name().replace("-", "-1")}
    (tmp_path / "ranks").mkdir()
    environment = rank_environment({}) | place | gone | {"STANDIN_LIMIT_S": "600"}
    reading, writing = os.pipe()
    os.close(reading)
    rank = subprocess.Popen([sys.executable, "-m", STANDIN, str(tmp_path)], env=environment, stderr=writing)
    os.close(writing)
    try:
        assert rank.wait(patience(30)) == 1
    finally:
        rank.kill()


@pytest.mark.nightly
def test_ranks_that_lose_their_launcher_are_waited_for(tmp_path: Path) -> None:
    lost: list[psutil.Process] = []

    def look() -> None:
        if started(tmp_path, 0) and not lost:
            lost.extend(ranks_here())
            lost[0].parent().kill()

    program = (STANDIN, str(tmp_path))
    assert run_ranks(2, program, tmp_path, rank_environment({}), 3, StopRequest(), look) == -9
    assert len(lost) == 2
    assert not any(rank.is_running() for rank in lost)
    assert Outcome.read(tmp_path / OUTCOME).state == "stopped"


def test_a_foreign_folder_to_meet_in_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ranks").symlink_to(tmp_path / "elsewhere")
    with refused("is a link or another user"):
        run_ranks(1, (STANDIN, str(tmp_path)), tmp_path, {}, 0, StopRequest())


FIRST = """
import sys
from pathlib import Path
from dphybrid.cluster.launch import rank_environment, run_ranks
from dphybrid.util.stop import StopRequest
folder = Path(sys.argv[1])
program = ("tests.cluster.standin", str(folder))
sys.exit(run_ranks(1, program, folder, rank_environment({}), 2, StopRequest()))
"""
OTHER = ["-m", "torch.distributed.run", "--max-restarts", "2", "-m", STANDIN]


@pytest.mark.nightly
def test_ranks_that_two_launchers_start_meet_through_a_file(tmp_path: Path) -> None:
    said = [tmp_path / f"said-{number}" for number in range(2)]
    torchrun = {"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV_BACKEND": "c10d", "RDZV_ID": "a-job"}
    torchrun |= {"RDZV_ENDPOINT": str(tmp_path / "meeting"), "RDZV_CONF": "store_type=file"}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {f"PET_{name}": value for name, value in torchrun.items()}
    launchers = []
    for program, file in zip((["-c", FIRST], OTHER), said, strict=True):
        command = [sys.executable, *program, str(tmp_path)]
        with file.open("wb") as stream:
            launchers.append(subprocess.Popen(command, stdout=stream, stderr=stream, env=environment))
    try:
        wait_until(lambda: all("of 2\n" in file.read_text() for file in said), "the ranks met", 60)
        (tmp_path / "enough").touch()
        assert [launcher.wait(patience(90)) for launcher in launchers] == [0, 0]
        assert Outcome.read(tmp_path / OUTCOME).state == "trained"
        assert not any("Traceback" in file.read_text() for file in said)
    finally:
        for launcher in launchers:
            launcher.kill()
