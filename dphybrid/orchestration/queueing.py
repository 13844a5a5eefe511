"""The states of a flow run that waits for GPUs, gives way or is queued again, as Prefect shows them.

A run whose process died is queued again by its worker, which sees the process end. If the worker or the whole
machine died, too, any worker of the pool queues it again once Prefect's automation misses its heartbeats.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
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
from prefect.exceptions import ObjectAlreadyExists, PrefectException
from prefect.settings import PREFECT_API_URL
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Running

from dphybrid.config.settings import Settings
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError

STARTED_BY = "DPHYBRID_STARTED_BY"
"""Environment variable of a run's process: this start of the run, as in `OWNER_LABEL`."""
OWNER_LABEL = "dphybrid.home"
"""Label of a flow run: the last start of it: the name of its worker's process and a token. A process that
reads a different value no longer owns the run."""
DEATHS_LABEL = "dphybrid.deaths"
"""Label of a flow run: how often its process died. Prefect's own `run_count` also grows with each orderly
return to the queue, and with each `Running` state that says why the run waits."""

NO_GPU_TAG = "without-gpu"
"""Tag of a flow run that needs no GPU and obeys no training hours."""
MAX_DEATHS = 10
"""A flow run that has died this often is not queued again: the run itself may be what kills machines."""
SILENT = "no heartbeat: its machine died"
"""Message of the state that the automation of `dphybrid.orchestration.setup` gives to a run."""
SILENT_FOR = timedelta(seconds=200)
"""How long a run may send no heartbeat before the automation marks it: three heartbeats."""
_OBJECTION_S = 45.0
"""How long a run that the automation has marked may say that it lives (`alive_again`) before a worker queues
it again. After a long outage of the server, the automation also marks runs that have trained on."""
_STUCK_S = 120.0
"""How long a run may be pending while its process starts, or cancelling while it ends. Then it is queued
again, or Cancelled."""
_PAGE = 200
"""Prefect's server returns at most so many at once."""

UNREACHABLE = (httpx.HTTPError, RuntimeError)
"""What a call to Prefect's server raises when the server is unreachable, or refuses (see `refusal`).
ObjectNotFound is not among them: then somebody has deleted the flow run."""
REFUSED = (*UNREACHABLE, PrefectException)
"""What a call raises that could not do its work, for whatever reason."""
DELETED = "the flow run was deleted"

ENDINGS = ("NothingNew", "Kept", "Promoted")
"""Names of the final states that dphybrid adds to Prefect's own. The automation for dead machines lists them
all: a run that ended in an unlisted state would count as silent."""


def refusal(error: BaseException) -> str:
    """Return how Prefect's server has refused a request: an answer that asking again does not change, such as
    one to a wrong password. "" if the server is unreachable, overloaded or restarting."""
    if not isinstance(error, httpx.HTTPStatusError):
        return ""
    code, words = error.response.status_code, error.response.reason_phrase
    if code >= 500 or code in (408, 425, 429):
        return ""
    return f"{code} {words}{'; check PREFECT_API_AUTH_STRING' if code in (401, 403) else ''}"


@contextmanager
def reaching_server() -> Iterator[str]:
    """Yield the address of Prefect's server. Raises UserError if no address is set, or if the block finds
    that nothing answers there as Prefect's API does, or that another command sets it up, too."""
    address = PREFECT_API_URL.value()
    if not address:
        raise UserError("PREFECT_API_URL is not set; name the Prefect server, such as http://server:4200/api")
    try:
        yield address
    except httpx.HTTPError as error:
        if (why := refusal(error)) and not why.startswith("404"):
            raise UserError(f"PREFECT_API_URL={address}: the server refuses: {why}") from error
        raise UserError(
            f"PREFECT_API_URL={address}: no Prefect server answers there ({str(error)[:200]}); start one "
            "(`prefect server start`: its first start takes a while), or set its address, which ends in /api"
        ) from error
    except ObjectAlreadyExists as error:
        raise UserError(
            f"PREFECT_API_URL={address}: another command set it up meanwhile; try again"
        ) from error


def ended(name: str, text: str) -> State:
    """Return the final state `name`, one of `ENDINGS`, and print it."""
    assert name in ENDINGS
    print(f"{name}: {text}", flush=True)
    return Completed(name=name, message=text)


@contextmanager
def waiting(flow_run_id: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports why the run waits for GPUs: it prints a line and sets the run's state to
    WaitingForGPU. When the block ends, the state is Running again."""
    name, reported = "WaitingForGPU", False

    def show(state: State, before: str = "") -> None:
        """Set the state of the run if it is running, and its state has the name `before`."""
        with suppress(*REFUSED), get_client(sync_client=True) as client:
            now = client.read_flow_run(UUID(flow_run_id)).state
            # It may have been cancelled meanwhile, which must not be overwritten.
            if now is not None and now.type == StateType.RUNNING and before in ("", now.name):
                client.set_flow_run_state(UUID(flow_run_id), state, force=True)

    def report(reason: str) -> None:
        nonlocal reported
        print(f"Waiting for GPUs: {reason}", flush=True)
        show(Running(name=name, message=reason))
        reported = True

    try:
        yield report
    finally:
        if reported:
            show(Running(), name)


def wants_gpu(run: FlowRun, settings: Settings) -> bool:
    """Return whether a flow run will wait for a GPU, as far as its tags and parameters say. A run whose
    devices cannot be read waits for nothing: it fails."""
    if NO_GPU_TAG in run.tags:
        return False
    parameters, config = run.parameters, run.parameters.get("config")
    text = (
        parameters.get("devices") or (config.get("devices") if isinstance(config, dict) else None) or "auto"
    )
    for override in parameters.get("overrides") or []:
        name, _, value = str(override).partition("=")
        text = value if name.strip() == "devices" else text
    try:
        spec = parse_device_spec(str(text))
        return "cpu" not in parse_device_spec(settings.devices if spec.text == "auto" else spec.text).names
    except UserError:
        return False


def owned_elsewhere(run: FlowRun) -> bool:
    """Return whether this process no longer owns the flow run: it is queued again, or another worker has
    started it."""
    own = os.environ.get(STARTED_BY)
    queued = run.state is not None and run.state.type in (StateType.SCHEDULED, StateType.PENDING)
    return queued or (own is not None and run.labels.get(OWNER_LABEL, own) != own)


def one_death_more(run: FlowRun) -> dict[str, Any]:
    """Return the label that counts another death of a flow run."""
    deaths = run.labels.get(DEATHS_LABEL)
    return {DEATHS_LABEL: (deaths if isinstance(deaths, int) else 0) + 1}


def state_after_death(run: FlowRun, reason: str) -> State | None:
    """Return the new state of a run whose process died without setting one: queued again, or final with the
    reason; None if its state should stay as it is. Who sets it also sets the label `one_death_more`."""
    assert run.state is not None  # its process has set one
    if run.state.type == StateType.CANCELLING:
        return Cancelled(message=reason)
    # CRASHED, too: the automation marks dead runs so. All other final states stay.
    if run.state.type not in (StateType.RUNNING, StateType.PENDING, StateType.CRASHED):
        return None
    if run.deployment_id is None:
        return Crashed(message=reason)
    if (deaths := one_death_more(run)[DEATHS_LABEL]) >= MAX_DEATHS:
        return Crashed(message=f"{reason}, and it has died {deaths} times; it is not queued again")
    # At once, by the server's clock: a run that is queued by another one may wait for hours, and a deployment
    # that is changed meanwhile loses it.
    return AwaitingRetry(scheduled_time=run.state.timestamp, message=f"{reason}; queued again")


def alive_again(run: FlowRun) -> State | None:
    """Return the state that a live run sets when the automation has marked it as dead, else None."""
    if run.state is None or run.state.type != StateType.CRASHED or run.state.message != SILENT:
        return None
    return Running(message="it had sent no heartbeat, and it lives")


class LostRuns:
    """Finds the runs of a pool that Prefect's automation has marked because their machine died, and those
    that have been starting or ending for long.

    How long a run has been in a state, this object measures from its first look: the server's and this
    machine's clocks may differ.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._seen: dict[UUID, float] = {}

    def queue(self) -> list[str]:
        """Queue the lost runs again; return a line for each. Does nothing while the server is unreachable."""
        kinds = [StateType.PENDING, StateType.CRASHED, StateType.CANCELLING]
        of_these = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=kinds)),
            tags=FlowRunFilterTags(all_=["dphybrid"]),
        )
        pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[self._pool]))
        lines, runs, now, before = list[str](), list[FlowRun](), time.monotonic(), self._seen
        with suppress(*REFUSED), get_client(sync_client=True) as client:
            while page := client.read_flow_runs(
                work_pool_filter=pool,
                flow_run_filter=of_these,
                sort=FlowRunSort.ID_DESC,
                offset=len(runs),
            ):
                runs += page
                if len(page) < _PAGE:
                    break
            states = [run.state.id for run in runs if run.state is not None]
            self._seen = {state: before.get(state, now) for state in states}
            for run in runs:
                if state := self._state_if_lost(run, now):
                    client.update_flow_run_labels(run.id, one_death_more(run))
                    client.set_flow_run_state(run.id, state, force=True)
                    lines.append(f"flow run {run.name}: {state.message}")
        return lines

    def _state_if_lost(self, run: FlowRun, now: float) -> State | None:
        """Return the new state of a run that nobody else will continue or end, else None."""
        assert run.state is not None  # the caller asks for certain states
        since_s = now - self._seen[run.state.id]
        if run.state.type != StateType.CRASHED:
            ends = "start" if run.state.type == StateType.PENDING else "end"
            return state_after_death(run, f"its process did not {ends}") if since_s >= _STUCK_S else None
        if run.state.message != SILENT or since_s < _OBJECTION_S:
            return None  # the run itself crashed, or was queued too often; or it may live
        return state_after_death(run, SILENT)
