"""What becomes of a dead run, and what a worker does with other people's deployments."""

import asyncio
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from anyio import CapacityLimiter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound, Pause
from prefect.states import Crashed
from prefect.workers.process import ProcessWorker, ProcessWorkerResult

from dphybrid.orchestration import queueing, supervised, worker
from dphybrid.orchestration.queueing import (
    DEATHS_LABEL,
    MAX_DEATHS,
    OWNER_LABEL,
    SILENT,
    STARTED_BY,
    LostRuns,
    owned_elsewhere,
    state_after_death,
)
from dphybrid.util.stop import StopRequest
from tests.fake_nvml import gpu, stand_in, write_state
from tests.waiting import wait_until


def dead_run(kind: StateType = StateType.RUNNING, deaths: int = 0, **facts: Any) -> FlowRun:
    labels: Any = {OWNER_LABEL: "77 token", DEATHS_LABEL: deaths}
    state = State(type=kind)
    known = {"id": uuid4(), "flow_id": uuid4(), "name": "run", "deployment_id": uuid4()} | facts
    return FlowRun(labels=labels, state=state, run_count=20, **known)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (dead_run(), "AwaitingRetry"),
        (dead_run(StateType.CRASHED), "AwaitingRetry"),  # Prefect's worker has said so
        (dead_run(StateType.PENDING), "AwaitingRetry"),
        (dead_run(deaths=MAX_DEATHS - 1), "Crashed"),  # it may be what kills its machine
        (dead_run(StateType.CANCELLING), "Cancelled"),
        (dead_run(StateType.FAILED), None),
        (dead_run(StateType.SCHEDULED), None),
        (dead_run(deployment_id=None), "Crashed"),
    ],
)
def test_a_run_whose_process_died_is_queued_again(run: FlowRun, name: str | None) -> None:
    state = state_after_death(run, "its process died (-9)")
    assert (state and state.name) == name
    if state is not None and name == "AwaitingRetry":
        assert run.state is not None
        assert state.state_details.scheduled_time == run.state.timestamp, "due at once, by the server's clock"
    assert state is None or (state.message or "").startswith("its process died (-9)")


@pytest.mark.parametrize(("kind", "states"), [("RUNNING", ["AwaitingRetry"]), ("PAUSED", [])])
def test_an_orderly_return_to_the_queue_does_not_count_as_a_death(
    kind: str, states: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was paused on Prefect's pages stays so until it is resumed there."""
    run, given = dead_run(StateType[kind], deaths=3, work_queue_id=uuid4()), list[State]()
    client = SimpleNamespace(
        read_flow_run=lambda _: run,
        update_flow_run_labels=lambda _, labels: run.labels.update(labels),
        set_flow_run_state=lambda _id, state, force: given.append(state),
    )
    monkeypatch.setattr(supervised, "get_client", lambda **_: nullcontext(client))
    with pytest.raises(Pause):
        supervised._leave(str(run.id), "it gave way", 60.0)
    assert [state.name for state in given] == states
    for state in given:
        due = state.state_details.scheduled_time
        assert due is not None
        assert 50 < (due - datetime.now(UTC)).total_seconds() <= 60
    assert run.labels[DEATHS_LABEL] == 3


def answer(code: int) -> httpx.HTTPStatusError:
    """What a client raises when the server answers with a status."""
    request = httpx.Request("GET", "http://prefect/api")
    return httpx.HTTPStatusError(str(code), request=request, response=httpx.Response(code, request=request))


class Client:
    """Prefect's, with one run; its server is away at the first questions, or answers with a status."""

    def __init__(self, run: FlowRun, *answers: Exception) -> None:
        self.run, self.asked, self.states, self.deleted = run, 0, list[State](), False
        self.answers = answers or (httpx.ConnectError("no server here"),)

    async def read_flow_run(self, _id: object) -> FlowRun:
        self.asked += 1
        if self.asked <= len(self.answers):
            raise self.answers[self.asked - 1]
        return deleted(None) if self.deleted else self.run

    async def update_flow_run_labels(self, _id: object, labels: dict[str, Any]) -> None:
        self.run.labels |= labels

    async def set_flow_run_state(self, _id: object, state: State, force: bool) -> None:
        assert force
        self.states.append(state)


@pytest.mark.parametrize(
    ("status", "meanwhile", "queued"),
    [(-9, "", True), (-9, "taken", False), (0, "", False), (-9, "deleted", False), (0, "deleted", False)],
)
def test_a_worker_queues_a_run_again_whose_process_died(
    status: int, meanwhile: str, queued: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    run = dead_run(StateType.CRASHED)

    async def died(_worker: object, _run: object, configuration: Any, _status: object) -> ProcessWorkerResult:
        assert configuration.env[STARTED_BY] == run.labels[OWNER_LABEL]
        if meanwhile == "taken":  # another worker has started it since
            run.labels[OWNER_LABEL] = "78 other"
        client.deleted = meanwhile == "deleted"
        return ProcessWorkerResult(status_code=status, identifier="1")

    monkeypatch.setattr(ProcessWorker, "run", died)
    monkeypatch.setattr(worker, "_ASK_AGAIN_S", 0)
    one, client = worker.DrainingWorker(work_pool_name="gpu", name="one"), Client(run)
    monkeypatch.setattr(one, "_client", client)
    done = asyncio.run(one.run(run, SimpleNamespace(env={})))
    assert done.status_code == 0  # or Prefect would call the run crashed
    assert [state.name for state in client.states] == ["AwaitingRetry"] * queued
    assert run.labels[DEATHS_LABEL] == queued
    if status and meanwhile == "deleted":
        assert "flow run run: the flow run was deleted" in caplog.text


@pytest.mark.parametrize(
    ("codes", "asked"), [([401], 1), ([409], 1), ([422], 1), ([503, 429, 500], 4), ([503, 401], 2)]
)
def test_a_worker_asks_a_server_again_unless_it_refuses(
    codes: list[int], asked: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Else the worker would ask for ever, and its slot would stay taken."""

    async def died(*_: object) -> ProcessWorkerResult:
        return ProcessWorkerResult(status_code=-9, identifier="1")

    run = dead_run(StateType.CRASHED)
    monkeypatch.setattr(ProcessWorker, "run", died)
    monkeypatch.setattr(worker, "_ASK_AGAIN_S", 0)
    one, client = worker.DrainingWorker(work_pool_name="gpu", name="one"), Client(run, *map(answer, codes))
    monkeypatch.setattr(one, "_client", client)
    asyncio.run(asyncio.wait_for(one.run(run, SimpleNamespace(env={})), 20))
    assert client.asked == asked
    refused = 400 <= codes[-1] < 500
    assert len(client.states) == (not refused)
    assert ("Prefect refuses its new state: " in caplog.text) == refused


def deleted(_id: object) -> FlowRun:
    raise ObjectNotFound(Exception("404"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda _: dead_run(StateType.CANCELLING), "Prefect (flow run "),
        (lambda _: dead_run(StateType.PAUSED), "Prefect (flow run "),
        (deleted, "Prefect (the flow run was deleted)"),
    ],
)
def test_a_run_cancelled_or_deleted_in_prefect_is_asked_to_stop(
    answer: Callable[[object], FlowRun], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SimpleNamespace(read_flow_run=answer)
    monkeypatch.setattr(supervised, "get_client", lambda **_: nullcontext(client))
    stop = StopRequest()
    with supervised.watched_flow_run(str(uuid4()), stop, every_s=0.01):
        wait_until(lambda: stop.pending, "it was asked")
    assert stop.reason.startswith(words)


def test_a_run_that_lives_is_running_again_after_it_was_thought_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dead_run()
    run.state = Crashed(message=SILENT)

    def set_state(_id: object, state: State, force: bool) -> None:
        assert force
        run.state = state

    client = SimpleNamespace(read_flow_run=lambda _: run, set_flow_run_state=set_state)
    monkeypatch.setattr(supervised, "get_client", lambda **_: nullcontext(client))
    stop = StopRequest()
    with supervised.watched_flow_run(str(run.id), stop, every_s=0.01):
        wait_until(lambda: run.state and run.state.type == StateType.RUNNING, "it is running")
        run.state = Crashed(message="something else")
        wait_until(lambda: stop.pending, "it was asked")


def test_no_clock_decides_which_runs_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs on two pages, seen where the clock differs from the server's."""
    pending, silent = dead_run(StateType.PENDING, name="pending"), dead_run(name="silent")
    ending = dead_run(StateType.CANCELLING, name="ending")
    silent.state = Crashed(message=SILENT)
    for run in (pending, silent, ending):
        run.state.timestamp = datetime.now(UTC) - timedelta(hours=1)
    every = [pending, ending, *[dead_run(StateType.SCHEDULED) for _ in range(250)], silent]
    client = SimpleNamespace(
        read_flow_runs=lambda offset, **_: every[offset : offset + 200],
        update_flow_run_labels=lambda *_: None,
        set_flow_run_state=lambda *_, **__: None,
    )
    monkeypatch.setattr(queueing, "get_client", lambda **_: nullcontext(client))
    now = 1000.0
    monkeypatch.setattr(queueing, "time", SimpleNamespace(monotonic=lambda: now))
    lost = LostRuns("gpu")
    assert lost.queue() == []
    now += 40
    assert lost.queue() == []
    now += 10
    assert [line.split(":")[0] for line in lost.queue()] == ["flow run silent"]
    now += 100
    told = lost.queue()
    assert "flow run pending: its process did not start; queued again" in told
    assert "flow run ending: its process did not end" in told


def test_a_process_knows_when_its_run_lives_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dead_run()
    assert not owned_elsewhere(run)  # no worker of ours started it
    monkeypatch.setenv(STARTED_BY, "77 token")
    assert not owned_elsewhere(run)  # though Prefect's count has grown with its waiting
    run.labels[OWNER_LABEL] = "78 other"
    assert owned_elsewhere(run)


def test_while_no_gpu_is_free_runs_that_need_one_stay_queued(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[Any] = []

    async def submit(_worker: object, entries: list[Any]) -> list[Any]:
        given.append([entry.flow_run.name for entry in entries])
        return []

    monkeypatch.setattr(ProcessWorker, "_submit_scheduled_flow_runs", submit)
    one = worker.DrainingWorker(work_pool_name="gpu", name="one")
    running = 0
    monkeypatch.setattr(worker.DrainingWorker, "num_running", property(lambda _: running))
    entries = [
        SimpleNamespace(flow_run=dead_run(StateType.SCHEDULED, name=name, parameters=parameters, tags=tags))
        for name, parameters, tags in (
            ("auto", {}, []),
            ("cpu", {"config": {"devices": "cuda:0"}, "overrides": ["devices = CPU*2"]}, []),
            ("two", {"devices": "auto*2", "config": {"devices": "cpu"}}, []),
            ("clean-up", {}, ["without-gpu"]),
        )
    ]

    def submitted(free: tuple[int, set[int]] | None) -> Any:
        monkeypatch.setattr(worker, "free_now", lambda *_: free)
        asyncio.run(one._submit_scheduled_flow_runs(entries))
        return given[-1]

    caplog.set_level("INFO")
    monkeypatch.setattr(one, "inventory", SimpleNamespace(broken=False))
    assert submitted(None) == ["auto", "cpu", "two", "clean-up"], "a machine without GPUs"
    assert submitted((2, set())) == ["auto", "cpu", "two", "clean-up"]
    assert submitted((1, set())) == ["auto", "cpu", "clean-up"]
    running = 1  # it is still starting, and will take the free GPU
    assert submitted((1, set())) == ["cpu", "clean-up"]
    assert submitted((0, set())) == ["cpu", "clean-up"]
    assert caplog.text.count("no GPU is free here") == 1
    with subprocess.Popen(["sleep", "60"]) as child:
        assert submitted((1, {child.pid})) == ["auto", "cpu", "clean-up"], "it has leased its GPU"
        child.kill()
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu")
    assert submitted((0, set())) == ["auto", "cpu", "clean-up"]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_worker_takes_as_many_runs_as_gpus_answer_now(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_worker: object) -> list[Any]:
        return []

    monkeypatch.setattr(ProcessWorker, "get_and_submit_flow_runs", nothing)
    machine = stand_in(monkeypatch, tmp_path, 2)

    async def limits() -> list[float]:
        found = []
        for follows in (True, False):
            one = worker.DrainingWorker(work_pool_name="gpu", name="one", limit=7, follows_gpus=follows)
            monkeypatch.setattr(one, "_limiter", CapacityLimiter(7))
            await one.get_and_submit_flow_runs()
            write_state(machine, [gpu(n) for n in range(number)])
            await one.get_and_submit_flow_runs()
            found.append(one.limiter.total_tokens)
        return found

    assert asyncio.run(limits()) == [max(1, number), 7]
