"""What workers take from the queue, leave there for others, and give back; and runs that can never begin.
Real servers and workers, on stand-in GPUs."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

from dphybrid.util.alive import LOCK
from dphybrid.util.locks import is_held
from tests.fake_nvml import gpu, write_state
from tests.flows.servers import Team
from tests.flows.test_workers import LONG, SHORT
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def no_workers_left(team: Team) -> Iterator[None]:
    write_state(team.gpus, [gpu(number) for number in range(4)])
    yield
    team.end_workers()


def busy_machine(team: Team, name: str, gpus: list[dict[str, object]]) -> dict[str, str]:
    """Return the variables of another workstation, with these GPUs."""
    file = Path(team.folder / f"{name}.json")
    write_state(file, gpus)
    return {"FAKE_NVML": str(file), "DPHYBRID_LEASE_DIR": str(team.folder / f"leases-{name}")}


@pytest.mark.slow
def test_a_worker_without_a_free_gpu_leaves_runs_for_others(team: Team) -> None:
    full = busy_machine(team, "full", [gpu(number, load=99) for number in range(2)])
    team.start_machine("full", 2, "any", **full)
    on_gpu, on_cpu = team.run_many(
        [("train-hybrid", {"overrides": [*SHORT, f"devices={devices}"]}) for devices in ("auto*1", "cpu")]
    )
    team.wait_for(on_cpu, "Completed")
    log = (team.folder / "full.log").read_text()
    assert "no GPU is free here; left in the queue, for other workers: 1 run" in log
    assert team.state(on_gpu) in ("Scheduled", "Late")
    team.start_machine("two", 1, "any", "night")
    team.wait_for(on_gpu, "Completed")


@pytest.mark.slow
def test_a_flow_that_cannot_be_loaded_fails_once_with_the_reason(team: Team) -> None:
    team.start_machine("one", 1, "any")
    there = team.post("/deployments/name/train-hybrid/train-hybrid")
    for number, (entrypoint, reason) in enumerate(
        (
            ("dphybrid.flows.nowhere:train_hybrid", "No module named 'dphybrid.flows.nowhere'"),
            ("dphybrid.flows.train_hybrid:nothing", "nothing"),
        )
    ):
        page = {name: there[name] for name in ("flow_id", "parameters", "pull_steps", "tags")} | {
            "name": f"broken-{number}",
            "entrypoint": entrypoint,
            "work_pool_name": "gpu",
            "work_queue_name": "any",
        }
        made = team.post("/deployments/", page)
        run = UUID(team.post(f"/deployments/{made['id']}/create_flow_run", {"parameters": {}})["id"])
        team.wait_for(run, "Failed")
        state = team.flow_run(run)["state"]
        assert state["message"].startswith(f"entrypoint '{entrypoint}': ")
        assert reason in state["message"]
        assert team.flow_run(run)["labels"]["dphybrid.begun"] == 1


@pytest.mark.slow
def test_a_paused_run_frees_its_gpus_and_goes_on_where_it_stopped(team: Team) -> None:
    team.start_machine("one", 1, "any", SLOW="0.1")
    (run,) = team.run_many([("train-hybrid", {"overrides": LONG})])
    folder = team.wait_for_checkpoint(run)
    until = (datetime.now(UTC) + timedelta(minutes=10)).isoformat()
    paused = {"type": "PAUSED", "name": "Suspended"}
    paused |= {"state_details": {"pause_timeout": until, "pause_reschedule": True}}
    team.post(f"/flow_runs/{run}/set_state", {"state": paused, "force": True})
    wait_until(lambda: not is_held(folder / LOCK) and not team.holders(), "it has left", 60)
    assert team.state(run) == "Suspended"
    team.post(f"/flow_runs/{run}/resume", {})
    wait_until(lambda: json.loads((folder / "run.json").read_text())["attempt"] == 2, "it goes on", 90)
    assert is_held(folder / LOCK)
    team.cancel(run)
    team.wait_for(run, "Cancelled")
