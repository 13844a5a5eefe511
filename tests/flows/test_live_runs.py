"""What becomes of a dead run, and what a worker does with other people's deployments."""

import asyncio
import os
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client import orchestration
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import AwaitingRetry, Crashed, Running
from prefect.workers.process import ProcessWorker, ProcessWorkerResult

from dphybrid.orchestration import queueing, supervised, worker
from dphybrid.orchestration.plugin import refuse_wrong_parameters, setup_environment
from dphybrid.orchestration.queueing import (
    MAX_RUNS,
    OWNER_LABEL,
    SILENT,
    STARTED_BY,
    STARTS_LABEL,
    owned_elsewhere,
    queue_lost_runs,
    state_after_death,
)
from dphybrid.orchestration.worker import GuardedConfiguration, check_job
from dphybrid.util.importing import ONLY
from dphybrid.util.stop import StopRequest
from tests.refusing import refused
from tests.waiting import wait_until


def test_a_workers_run_imports_from_the_workers_packages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_FACTORY_PACKAGES", "mine")
    job = GuardedConfiguration()
    job.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="run"))
    assert job.env[ONLY] == "mine"


def dead_run(kind: StateType = StateType.RUNNING, starts: int = 1, **facts: Any) -> FlowRun:
    labels: Any = {OWNER_LABEL: "77 token", STARTS_LABEL: starts}
    state = State(type=kind)
    known = {"id": uuid4(), "flow_id": uuid4(), "name": "run", "deployment_id": uuid4()} | facts
    return FlowRun(labels=labels, state=state, run_count=20, **known)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (dead_run(), "AwaitingRetry"),
        (dead_run(StateType.CRASHED), "AwaitingRetry"),  # Prefect's worker has said so
        (dead_run(StateType.PENDING), "AwaitingRetry"),
        (dead_run(starts=MAX_RUNS), "Crashed"),  # it may be what kills its machine
        (dead_run(StateType.CANCELLING), "Cancelled"),
        (dead_run(StateType.FAILED), None),
        (dead_run(StateType.SCHEDULED), None),
        (dead_run(deployment_id=None), None),
        (dead_run(tags=["dphybrid", "machine"]), None),  # the first machine asks anew
    ],
)
def test_a_run_whose_process_died_is_queued_again(run: FlowRun, name: str | None) -> None:
    state = state_after_death(run, "its process died (-9)")
    assert (state and state.name) == name
    assert state is None or (state.message or "").startswith("its process died (-9)")


class Client:
    """Prefect's, with one run; its server is away at the first question."""

    def __init__(self, run: FlowRun) -> None:
        self.run, self.asked, self.states = run, 0, list[State]()

    async def read_flow_run(self, _id: object) -> FlowRun:
        self.asked += 1
        if self.asked == 1:
            raise httpx.ConnectError("no server here")
        return self.run

    async def update_flow_run_labels(self, _id: object, labels: dict[str, Any]) -> None:
        self.run.labels |= labels

    async def set_flow_run_state(self, _id: object, state: State, force: bool) -> None:
        assert force
        self.states.append(state)


@pytest.mark.parametrize(
    ("status", "taken", "queued"), [(-9, False, True), (-9, True, False), (0, False, False)]
)
def test_a_worker_queues_a_run_again_whose_process_died(
    status: int, taken: bool, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dead_run(StateType.CRASHED)

    async def died(_worker: object, _run: object, configuration: Any, _status: object) -> ProcessWorkerResult:
        assert configuration.env[STARTED_BY] == run.labels[OWNER_LABEL]
        if taken:  # another worker has started it since
            run.labels[OWNER_LABEL] = "78 other"
        return ProcessWorkerResult(status_code=status, identifier="1")

    monkeypatch.setattr(ProcessWorker, "run", died)
    monkeypatch.setattr(worker, "_ASK_AGAIN_S", 0)
    one, client = worker.DrainingWorker(work_pool_name="gpu", name="one"), Client(run)
    monkeypatch.setattr(one, "_client", client)
    done = asyncio.run(one.run(run, SimpleNamespace(env={})))
    assert done.status_code == 0  # or Prefect would call the run crashed
    assert [state.name for state in client.states] == ["AwaitingRetry"] * queued
    assert run.labels[STARTS_LABEL] == 2


def test_a_run_that_waited_when_it_was_thought_dead_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run, when = dead_run(StateType.CRASHED), datetime(2030, 1, 1, tzinfo=UTC)
    run.state = Crashed(message=SILENT)
    states = [Running(), AwaitingRetry(scheduled_time=when, message="GPU 0 is wanted"), run.state]
    given: list[State] = []
    client = SimpleNamespace(
        read_flow_runs=lambda **_: [run],
        read_flow_run_states=lambda _: states,
        set_flow_run_state=lambda _id, state, force: given.append(state),
    )
    monkeypatch.setattr(queueing, "get_client", lambda **_: nullcontext(client))
    assert queue_lost_runs("gpu") == ["flow run run: GPU 0 is wanted"]
    del states[1]
    assert queue_lost_runs("gpu") == [f"flow run run: {SILENT}; queued again"]
    assert given[0].state_details.scheduled_time == when
    assert [state.name for state in given] == ["AwaitingRetry"] * 2


def test_a_run_that_is_cancelled_in_prefect_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = SimpleNamespace(read_flow_run=lambda _: dead_run(StateType.CANCELLING))
    monkeypatch.setattr(queueing, "get_client", lambda **_: nullcontext(cancelled))
    stop = StopRequest()
    with supervised.watched_flow_run(str(uuid4()), stop, every_s=0.01):
        wait_until(lambda: stop.pending, "it was asked")
    assert stop.reason.startswith("Prefect (flow run ")


def test_a_process_knows_when_its_run_lives_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dead_run()
    assert not owned_elsewhere(run)  # no worker of ours started it
    monkeypatch.setenv(STARTED_BY, "77 token")
    assert not owned_elsewhere(run)  # though Prefect's count has grown with its waiting
    run.labels[OWNER_LABEL] = "78 other"
    assert owned_elsewhere(run)


SHELL = [{"prefect.deployments.steps.run_shell_script": {"script": "id"}}]
HARMLESS = [{"prefect.deployments.steps.set_working_directory": {"directory": "/tmp"}}]
OWN = "dphybrid.flows.train_hybrid:train_hybrid"
ELSEWHERE = ["/home/eve/evil.py:flow", "evil.py:flow", "dphybrid/../evil.py:flow", "dphybrid.py:flow"]
ELSEWHERE += ["dphybrid.evil", ""]


@pytest.mark.parametrize(
    ("job", "steps", "entrypoint", "packages", "words"),
    [
        ({}, [], OWN, "", ""),
        ({}, HARMLESS, OWN, "", ""),
        ({"command": "sh -c id"}, [], OWN, "", "no command .*DPHYBRID_WORKER_ALLOWS=command"),
        ({"env": {"PYTHONPATH": "/tmp"}}, [], OWN, "", "no env .*DPHYBRID_WORKER_ALLOWS=env"),
        ({"working_dir": "/tmp"}, None, OWN, "", "no working_dir .*DPHYBRID_WORKER_ALLOWS=working_dir"),
        ({}, SHELL, OWN, "", "no pull_steps .*DPHYBRID_WORKER_ALLOWS=pull_steps"),
        ({}, None, "mine.flows:nightly", "others, mine", ""),
        ({}, None, "mine.flows:nightly", "", "entrypoint .*would run code of package 'mine'"),
        *(({}, None, place, "evil", "entrypoint .*only flows of packages") for place in ELSEWHERE),
    ],
)
def test_a_worker_takes_no_commands_and_runs_flows_of_named_packages_alone_unless_it_is_set_to(
    job: dict[str, Any],
    steps: Any,
    entrypoint: str,
    packages: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: Any = GuardedConfiguration(**job), SimpleNamespace(pull_steps=steps, entrypoint=entrypoint)
    monkeypatch.delenv("DPHYBRID_WORKER_ALLOWS", raising=False)
    monkeypatch.setenv("DPHYBRID_FACTORY_PACKAGES", packages)
    with refused(words) if words else nullcontext():
        check_job(*given)
    if "ALLOWS=" in words:
        monkeypatch.setenv("DPHYBRID_WORKER_ALLOWS", words.rpartition("=")[2])
        check_job(*given)


class OneDeployment:
    """Answers with one deployment, whose parameters somebody else wrote."""

    def __init__(self, **parameters: Any) -> None:
        self.deployment = SimpleNamespace(
            name="train", tags=["dphybrid"], entrypoint="", parameters=parameters
        )

    async def read_deployment(self, _: str) -> Any:
        return self.deployment


@pytest.mark.parametrize(
    "parameters", [{"overrides": ["recipe=evilmod:Nothing"]}, {"config": {"recipe": "evilmod:Nothing"}}]
)
def test_a_deployment_s_parameters_import_no_foreign_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path, parameters: dict[str, Any]
) -> None:
    (tmp_path / "evilmod.py").write_text("raise SystemExit('evil ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("would run code of package 'evilmod'"):
        asyncio.run(refuse_wrong_parameters(OneDeployment(**parameters), "id", {}))
    assert "evilmod" not in sys.modules
    assert ONLY not in os.environ
    asyncio.run(refuse_wrong_parameters(OneDeployment(config={"recipe": "toy"}), "id", {}))


@pytest.mark.parametrize("missing", ["read_deployment_by_name", "create_flow_run_from_deployment"])
def test_a_client_of_prefect_without_the_methods_is_left_unchanged(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"read_deployment_by_name", "create_flow_run_from_deployment"}
    client = type("PrefectClient", (), dict.fromkeys(names - {missing}, len))
    monkeypatch.setattr(orchestration, "PrefectClient", client)
    setup_environment(ctx=None)
    assert [value for name, value in vars(client).items() if name in names] == [len]
