"""Runs that were deleted on Prefect's pages, and runs whose machines lost their power: real servers and
workers, on stand-in GPUs."""

import signal
import sys
import time
from collections.abc import Iterator

import pytest

from dphybrid.orchestration.queueing import SILENT
from tests.fake_nvml import gpu, write_state
from tests.flows.servers import Team, kill_tree
from tests.flows.test_workers import LONG, SHORT, mlflow_run
from tests.waiting import patience, wait_until

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def no_workers_left(team: Team) -> Iterator[None]:
    write_state(team.gpus, [gpu(number) for number in range(4)])
    yield
    team.end_workers()


@pytest.mark.slow
def test_deleted_runs_end_as_if_cancelled_and_free_their_slots(team: Team) -> None:
    worker = team.start_worker("one", "--limit", "2", SLOW="0.12")
    overrides = [*LONG, "train.epochs=600", "devices=cuda:0"]
    first, second = team.run_many([("train-hybrid", {"overrides": overrides})] * 2)
    wait_until(
        lambda: sorted(map(team.state, (first, second))) == ["Running", "WaitingForGPU"], "one waits", 120
    )
    training, waiting = sorted((first, second), key=team.state)
    folder = team.wait_for_checkpoint(training)
    (later,) = team.run_many([("train-hybrid", {"overrides": [*SHORT, "devices=cuda:1"]})])
    assert team.state(later) in ("Scheduled", "Late", "Pending")  # the two others have the slots
    for run in (training, waiting):
        team.post(f"/flow_runs/{run}", method="DELETE")
    team.wait_for(later, "Completed", timeout_s=60)
    wait_until(lambda: not team.holders(), "no GPU is leased", 30)
    assert mlflow_run(team, folder).info.status == "KILLED"
    told = (team.folder / "one.log").read_text()
    assert told.count("the flow run was deleted; it has ended, its run folder stays") == 2
    assert "Traceback" not in told
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(patience(30)) == 0


@pytest.mark.slow
def test_after_a_power_cut_a_run_goes_on_when_its_machine_is_back(team: Team) -> None:
    worker = team.start_worker("one", "--limit", "1", SLOW="0.12")
    (run,) = team.run_many([("train-hybrid", {"overrides": LONG})])
    team.wait_for_checkpoint(run)
    server = next(child for child in reversed(team.started) if "server" in child.args)  # type: ignore[operator]
    for child in (server, worker):
        kill_tree(child)
    team.start_server()
    assert team.state(run) == "Running"
    worker = team.start_worker("one", "--limit", "1")
    team.wait_for(run, "Completed", timeout_s=120)
    assert "its worker died with it; queued again" in (team.folder / "one.log").read_text()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(patience(30)) == 0


SHORTLY = """
import asyncio, sys
from datetime import timedelta
from dphybrid.orchestration import setup
setup.SILENT_FOR = timedelta(seconds=float(sys.argv[1]))
print(asyncio.run(setup._upsert_automation()))
"""


@pytest.mark.slow
def test_a_server_that_was_down_when_a_run_fell_silent_notices_it(team: Team) -> None:
    assert "updated" in team.command(sys.executable, "-c", SHORTLY, "10").stdout
    try:
        (run,) = team.run_many([("train-hybrid", {"overrides": SHORT})])
        state = {"type": "RUNNING", "name": "Running"}
        team.post(f"/flow_runs/{run}/set_state", {"state": state, "force": True})
        time.sleep(3)  # the event reaches the automation
        kill_tree(next(child for child in reversed(team.started) if "server" in child.args))  # type: ignore[operator]
        time.sleep(75)  # Prefect drops what ended more than a minute ago, unless it is told to keep it
        team.start_server()
        team.wait_for(run, "Crashed", timeout_s=60)
        assert team.flow_run(run)["state"]["message"] == SILENT
    finally:
        team.command(sys.executable, "-c", SHORTLY, "200")
