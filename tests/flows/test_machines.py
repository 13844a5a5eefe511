"""Runs over several machines: each worker of a real server stands for one; their ranks learn nothing."""

import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from dphybrid.cluster.engine import versions
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import load_settings
from dphybrid.orchestration.machines import SEAT, Seat, check_nodes, over_machines, same_run
from dphybrid.recipes.configs import apply_overrides, load_config
from dphybrid.run.folder import RunPage
from tests.fake_nvml import gpu, write_state
from tests.flows.servers import Team
from tests.refusing import refused
from tests.waiting import patience, wait_until

RUN = "together"
long_form = pytest.mark.skipif(
    "DPHYBRID_LONG_TESTS" not in os.environ, reason="minutes: DPHYBRID_LONG_TESTS=1"
)
OVER = ("Completed", "Failed", "Crashed", "Cancelled", "Left")


def spread(ranks: int) -> ExperimentConfig:
    values = ["recipe=ctr", "data.path=clicks.csv", "data.label=clicked", "devices=auto*1"]
    return load_config(None, [*values, f"cluster.ranks={ranks}"])


def make_run(data: Path) -> Path:
    """Make what a machine looks at of a run: its page, and a folder of prepared data."""
    prepared, folder = data / "prepared" / "clicks", data / "runs" / RUN
    prepared.mkdir(parents=True)
    folder.mkdir(parents=True)
    page = RunPage(
        run_id="",
        attempt=1,
        config=spread(2).model_dump(mode="json"),
        devices="cpu",
        prepared=str(prepared),
        data_digest="",
        created="2026-01-01T00:00:00+00:00",
    )
    page.write(folder / "run.json")
    return folder


def test_each_machine_has_as_many_ranks(data_dir: Path) -> None:
    check_nodes(spread(4), 2)
    with refused("nodes=3 with cluster.ranks=4: .* use 3, or leave cluster.ranks out"):
        check_nodes(spread(4), 3)
    three_of_each = apply_overrides(spread(0), ["devices=cpu*3"])
    assert over_machines(three_of_each, 2, load_settings()).cluster.ranks == 6
    assert over_machines(three_of_each, 1, load_settings()).cluster.ranks == 0


def test_a_machine_that_sees_something_else_is_refused(data_dir: Path) -> None:
    folder = data_dir / "runs" / RUN
    make_run(data_dir)
    seat = Seat(
        head=UUID(int=1),
        home="1 2 there",
        host=platform.node(),
        run=RUN,
        job="1-1",
        nodes=2,
        node=0,
        address="127.0.0.1",
        wait_s=1,
        versions=versions(),
    )

    def refuses(given: Seat, words: str) -> None:
        with refused(words):
            same_run(given, load_settings())

    refuses(seat, r"does not see .*\.machines .*DPHYBRID_DATA_DIR")
    (folder / SEAT).write_text(seat.model_dump_json())
    by_server = seat.model_copy(update={"versions": dict(reversed(seat.versions.items()))})
    assert same_run(by_server.model_copy(update={"node": 1}), load_settings()).folder == folder
    refuses(seat.model_copy(update={"address": "elsewhere"}), "finds other values in .* than .* sent")
    for update, words in (
        ({"host": "there"}, "there's ranks listen at 127.0.0.1, .*DPHYBRID_CLUSTER_ADDRESS on there"),
        ({"versions": versions() | {"torch": "2.0"}}, "has torch .*has 2.0; give all machines"),
    ):
        other = seat.model_copy(update=update)
        (folder / SEAT).write_text(other.model_dump_json())
        refuses(other, words)
    (folder / SEAT).write_text(seat.model_dump_json())
    (data_dir / "prepared" / "clicks").rmdir()
    refuses(seat, "does not see the prepared data")


@pytest.fixture
def folder(team: Team) -> Iterator[Path]:
    """A run, and the deployments of `together`; no worker is left after the test."""
    folder = make_run(team.folder / "data")
    like = team.post("/deployments/name/train-hybrid/train-hybrid")
    own: list[str] = []
    for flow, function in ((RUN, "together"), ("join-hybrid", "join_hybrid")):
        page = {"name": RUN, "flow_id": team.post("/flows/", {"name": flow})["id"], "parameters": {}}
        page |= {"entrypoint": f"tests.flows.together:{function}", "enforce_parameter_schema": False}
        kept = ("work_pool_name", "work_queue_name", "job_variables", "tags", "pull_steps")
        made = team.post("/deployments/", {name: like[name] for name in kept} | page)
        own.append(f"deployments/{made['id']}")
    write_state(team.gpus, [gpu(number) for number in range(2)])
    yield folder
    write_state(team.gpus, [gpu(number) for number in range(4)])
    team.end_workers()
    ended = [f"flow_runs/{run['id']}" for flow in (RUN, "join-hybrid") for run in team.runs_of(flow)]
    for path in [*ended, *own]:  # a killed run would be begun again
        team.post(f"/{path}", method="DELETE")
    shutil.rmtree(folder)
    (team.folder / "data" / "prepared" / "clicks").rmdir()


def ranks_alive(folder: Path) -> int:
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum(line[-3:] == ["-m", "tests.flows.standin", str(folder)] for line in commands)


def both_work(team: Team, folder: Path) -> Any:
    """Return the other machine's flow run when ranks and leases of both are there."""
    newest = team.runs_of("join-hybrid")[:1]
    begun = newest and newest[0]["state"]["name"] == "Joined" and ranks_alive(folder) == 2
    return newest[0] if begun and len(team.holders()) == 2 else None


def both_started(team: Team) -> "tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]":
    workers = team.start_machine("one", 2, "any"), team.start_machine("two", 2)

    def known() -> set[str]:
        return {worker["name"] for worker in team.post("/work_pools/gpu/workers/filter", {})}

    wait_until(lambda: known() >= {"one", "two"}, "the server knows both", 60)
    return workers


def said(team: Team, *runs: UUID | str) -> list[str]:
    """The ranks that told of themselves in the logs of flow runs."""
    return sorted(number for run in runs for number in re.findall(r"rank (\d) of 2", team.lines_of(run)))


@pytest.mark.slow
def test_machines_gather_and_all_end_when_the_first_is_cancelled(team: Team, folder: Path) -> None:
    both_started(team)
    head, alone = team.run_many([(RUN, {"run": RUN, "machines": [name]}) for name in ("two", "nobody")])
    other = wait_until(lambda: both_work(team, folder), "both machines work", 60)
    assert other["name"] == f"{RUN} on two"
    wait_until(lambda: said(team, head, other["id"]) == ["0", "1"], "each one's lines are in its log", 20)
    team.wait_for(alone, "Failed")
    missing = r"pool gpu has no worker nobody; it has .*\bone\b.*\btwo\b.*; start `dphybrid worker`"
    assert re.search(missing, team.flow_run(alone)["state"]["message"])

    team.cancel(head)
    team.wait_for(head, "Cancelled", timeout_s=40)
    team.wait_for(other["id"], "Cancelled", "Left", timeout_s=20)
    wait_until(lambda: not team.holders() and not ranks_alive(folder), "nothing is held", 20)


@pytest.mark.slow
@long_form
def test_a_machine_that_dies_ends_all_and_one_that_hangs_is_missed(team: Team, folder: Path) -> None:
    _, two = both_started(team)
    (head,) = team.run_many([(RUN, {"run": RUN, "machines": ["two"], "wait_again_s": 1})])
    other = wait_until(lambda: both_work(team, folder), "both machines work", 60)
    (process,) = {psutil.Process(pid) for pid in team.holders().values()} & set(
        psutil.Process(two.pid).children(recursive=True)
    )
    process.kill()
    team.wait_for(other["id"], "Crashed", timeout_s=20)
    os.kill(two.pid, signal.SIGSTOP)
    try:
        team.wait_for(head, *OVER, timeout_s=60)
        assert team.flow_run(head)["run_count"] > 1
        assert team.state(head) == "Failed"
        missed = "1 of 2 machines did not join within 1 s: two (Scheduled"
        assert missed in team.flow_run(head)["state"]["message"]
        assert team.runs_of("join-hybrid")[0]["state"]["name"] == "Cancelled"
        assert not team.holders()
        assert not ranks_alive(folder)
    finally:
        os.kill(two.pid, signal.SIGCONT)


@pytest.mark.slow
@long_form
def test_stopping_a_worker_ends_all_and_begins_anew(team: Team, folder: Path) -> None:
    _, two = both_started(team)
    (head,) = team.run_many([(RUN, {"run": RUN, "machines": ["two"]})])
    other = wait_until(lambda: both_work(team, folder), "both machines work", 60)
    two.send_signal(signal.SIGTERM)  # its machine is wanted for something else
    assert two.wait(patience(40)) == 0
    assert team.state(other["id"]) == "Left"
    team.start_machine("two", 2)
    again = wait_until(
        lambda: (run := both_work(team, folder)) and run["id"] != other["id"] and run, "both again", 90
    )
    (folder / "enough").touch()
    team.wait_for(head, "Completed", timeout_s=40)
    team.wait_for(again["id"], "Completed", timeout_s=20)
    assert not team.holders()
