"""How a flow run waits, gives way, is late and is queued again: its states, as people see them in Prefect.

A run is queued again when its process died: by its worker, which sees its process end, and, when worker or
machine died too, by any worker of the pool once Prefect's automation has missed the run's heartbeats.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext, SettingsContext, get_settings_context
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Running

from dphybrid.util.errors import UserError

STARTED_BY = "DPHYBRID_STARTED_BY"
"""Environment variable in which a worker tells a run's process who started it: `PID TOKEN`, as in `HOME`."""
HOME = "dphybrid.home"
"""Label of a flow run: who started it last. A process that finds other words there has lost its run."""
WORKER = "DPHYBRID_WORKER"
"""Environment variable in which a worker tells a run's process its own name, which is its queue's, too."""
WORKER_LABEL = "dphybrid.worker"
"""Label of a flow run: the name of the worker that started it last."""
BEGUN = "dphybrid.begun"
"""Label of a flow run: how often it was started. Prefect's own count grows with each state that says that it
waits, too."""

MACHINE_TAG = "machine"
"""Tag of another machine's part of a run over several; the run's first machine asks for it anew."""
MAX_RUNS = 10
"""A flow run that was begun so often is not queued again: it may be what kills its machine."""
SILENT = "no heartbeat: its machine died"
"""What the automation of `dphybrid.orchestration.setup` writes on a run."""
SILENT_FOR = timedelta(seconds=200)
"""Silence after which it does; at least three heartbeats, or living runs would be begun twice."""
_STUCK = timedelta(seconds=120)
"""How long the start of a process may take."""

UNREACHABLE = (httpx.HTTPError, PrefectException, RuntimeError)
"""What a call to Prefect's server raises when it is away."""

ENDINGS = ("SkippedLate", "NothingNew", "NotEnoughNew", "Kept", "Promoted", "Left")
"""Names of the states, besides Prefect's own, that a flow run may end in. The automation for dead machines
has to know them all."""


@contextmanager
def reaching_server() -> Iterator[str]:
    """Yield the address of Prefect's server to what cannot begin without it. Raises UserError where none is
    set, and where the one that is set does not answer, or not as Prefect's API does."""
    address = PREFECT_API_URL.value()
    if not address:
        raise UserError("PREFECT_API_URL is not set; name the Prefect server, such as http://server:4200/api")
    try:
        yield address
    except httpx.HTTPError as error:
        raise UserError(
            f"PREFECT_API_URL={address}: no Prefect server answers there ({str(error)[:200]}); start one "
            "(`prefect server start`: its first start takes a while), or set its address, which ends in /api"
        ) from error


def client_for_threads() -> Callable[[], AbstractContextManager[SyncPrefectClient]]:
    """Return what opens a client in any thread, of the server that this thread has.

    A thread has none of its starter's settings, and without the address of a temporary server a client would
    start another one. It is a new client each time: one that has been connected retries for a minute when the
    server is away.
    """
    here = get_settings_context()

    @contextmanager
    def opened() -> Iterator[SyncPrefectClient]:
        with (
            SettingsContext(profile=here.profile, settings=here.settings),
            get_client(sync_client=True) as client,
        ):
            yield client

    return opened


def ended(name: str, text: str) -> State:
    """Return one of the `ENDINGS`, and tell it."""
    assert name in ENDINGS
    print(f"{name}: {text}", flush=True)
    return Completed(name=name, message=text)


@contextmanager
def shown_waiting(flow_run_id: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that tells why the run waits: as a line, and as the run's state WaitingForGPU, which
    ends with the block."""
    waiting = False

    def tell(reason: str) -> None:
        nonlocal waiting
        print(f"Waiting for GPUs: {reason}", flush=True)
        waiting = set_state(flow_run_id, Running(name="WaitingForGPU", message=reason)) or waiting

    try:
        yield tell
    finally:
        if waiting:
            set_state(flow_run_id, Running(), only_if="WaitingForGPU")


def set_state(flow_run_id: str, state: State, only_if: str | None = None) -> bool:
    """Give a running flow run another state of the same kind, or end it; return whether that was done.

    only_if: the name that its state must have. Not done to what does not run, nor while the server is away.
    """
    try:
        with get_client(sync_client=True) as client:
            now = client.read_flow_run(UUID(flow_run_id)).state
            if now is None or now.type != StateType.RUNNING or (only_if and now.name != only_if):
                return False  # cancelled meanwhile: not to be overwritten
            client.set_flow_run_state(UUID(flow_run_id), state, force=True)
    except UNREACHABLE:
        return False
    return True


def lives_elsewhere(run: FlowRun) -> bool:
    """Was this process's flow run given back to the queue, or begun by another worker since?"""
    own = os.environ.get(STARTED_BY)
    queued = run.state is not None and run.state.type in (StateType.SCHEDULED, StateType.PENDING)
    return queued or (own is not None and run.labels.get(HOME, own) != own)


def num_starts(run: FlowRun) -> int:
    """Return how often a run was started."""
    starts = run.labels.get(BEGUN)
    return starts if isinstance(starts, int) else 0


def after_death(run: FlowRun, reason: str) -> State | None:
    """Return the state of a run whose process died without a word: queued again, or why it is not; None for
    one that is left as it is."""
    assert run.state is not None  # its process has set one
    if run.state.type == StateType.CANCELLING:
        return Cancelled(message=reason)
    alive = run.state.type in (StateType.RUNNING, StateType.PENDING, StateType.CRASHED)
    if not alive or run.deployment_id is None or MACHINE_TAG in run.tags:
        return None
    if (starts := num_starts(run)) >= MAX_RUNS:
        return Crashed(message=f"{reason}, and it was begun {starts} times; it is not queued again")
    when = datetime.now(UTC) + timedelta(seconds=1)
    return AwaitingRetry(scheduled_time=when, message=f"{reason}; queued again")


def queue_lost_runs(pool: str) -> list[str]:
    """Queue the runs of a pool again whose machine died, or whose worker before they began, wherever that
    was; return a line for each. Does nothing while the server is away."""
    kinds = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.CRASHED]))
    lines = []
    try:
        with get_client(sync_client=True) as client:
            for run in client.read_flow_runs(
                work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
                flow_run_filter=FlowRunFilter(state=kinds, tags=FlowRunFilterTags(all_=["dphybrid"])),
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            ):
                assert run.state is not None  # the filter asks for one
                pending = run.state.type == StateType.PENDING
                if pending and datetime.now(UTC) - run.state.timestamp < _STUCK:
                    continue
                if not pending and run.state.message != SILENT:
                    continue  # it crashed by itself, or was queued too often
                state = None if pending else _waiting_before(client, run)
                state = state or after_death(run, "it did not begin" if pending else SILENT)
                if state is not None:
                    client.set_flow_run_state(run.id, state, force=True)
                    lines.append(f"flow run {run.name}: {state.message}")
    except UNREACHABLE:
        pass
    return lines


def _waiting_before(client: SyncPrefectClient, run: FlowRun) -> State | None:
    """Return the state, once more, of a run that had gone back to the queue before it was thought dead.

    Of a run that a schedule planned, Prefect's automations see no state for up to 15 minutes: each event
    waits for the one before it, and of the planning there is none.
    """
    *_, before, _ = [None, *client.read_flow_run_states(run.id)]
    if before is None or before.type != StateType.SCHEDULED:
        return None
    return AwaitingRetry(scheduled_time=before.state_details.scheduled_time, message=before.message)


def too_late(limit_min: float) -> State | None:
    """Return the state to end with when this run was planned by a schedule more than `limit_min` minutes ago,
    else None; 0: never.

    Prefect makes up for every missed time when a worker comes back; one run is enough.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if (
        not limit_min
        or run is None
        or not run.auto_scheduled
        or run.expected_start_time is None
        or run.run_count > 1
    ):
        return None
    late_min = (datetime.now(UTC) - run.expected_start_time).total_seconds() / 60
    if late_min <= limit_min:
        return None
    text = (
        f"planned for {run.expected_start_time:%Y-%m-%d %H:%M} UTC, {late_min:.0f} minutes ago; "
        f"skip_if_late_min is {limit_min:g}"
    )
    return ended("SkippedLate", text)
