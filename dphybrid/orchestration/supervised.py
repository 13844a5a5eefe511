"""Supervise a deployment's flow run: stop it when its worker dies or another worker has started it anew, and
queue it again when it had to stop early."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psutil
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import AwaitingRetry, Cancelled, Completed

from dphybrid.config.settings import load_settings
from dphybrid.orchestration.queueing import STARTED_BY, UNREACHABLE, client_for_threads, lives_elsewhere
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals, watching

_ASK_EVERY_S = 15.0
_ENDED = {StateType.CANCELLING, StateType.CANCELLED, StateType.CRASHED}


@contextmanager
def supervised(ending: str | None = None) -> Iterator[StopRequest]:
    """Supervise the flow run at hand while the block runs; yields the request to stop it, which its signals
    and its worker's death make.

    A block that is interrupted - to give way, by SIGTERM, or because its worker died - and is not cancelled
    is queued again; or, with an `ending` of `queueing.ENDINGS`, ends so.
    """
    without_tracebacks_of_user_errors()
    flow_run_id = runtime.flow_run.id if runtime.deployment.id else None
    stop = StopRequest()
    with ExitStack() as held:
        if flow_run_id is not None:  # a worker started it, and others see it
            _end_if_begun_elsewhere(flow_run_id)
            held.enter_context(noticing_the_workers_death(stop))
        try:
            with stop_signals(stop, at_once=True):
                yield stop
        except Interrupted as interruption:
            asked_to_end = interruption.signal_number == signal.SIGTERM
            if flow_run_id is not None:
                _leave(flow_run_id, str(interruption), interruption.requeue or asked_to_end, ending)
            if asked_to_end:
                raise TerminationSignal(signal=signal.SIGTERM) from interruption
            raise
        except TerminationSignal as ended:  # before or after these handlers
            if flow_run_id is not None:
                _leave(flow_run_id, f"stopped by {ended!r}", True, ending)
            raise


@contextmanager
def watched_flow_run(flow_run_id: str, stop: StopRequest, every_s: float = _ASK_EVERY_S) -> Iterator[None]:
    """While the block runs, ask its run to stop once the flow run is cancelled or was given up.

    Prefect's own observer dies for good in an outage of half a minute, and a cancelled run would train on.
    """
    opened = client_for_threads()

    def look() -> bool:
        try:
            with opened() as client:
                run = client.read_flow_run(UUID(flow_run_id))
        except UNREACHABLE:
            return False
        if run.state is not None and run.state.type in _ENDED:
            stop.ask(f"Prefect (flow run {run.state.name})")
            return True
        if lives_elsewhere(run):
            stop.ask("Prefect (the flow run was thought dead, and begun again elsewhere)")
            return True
        return False

    with watching(look, every_s, "dphybrid-flow-guard", end_s=0):
        yield


def _end_if_begun_elsewhere(flow_run_id: str) -> None:
    """End this process when another worker has started its run since: one whose start took too long."""
    try:
        with get_client(sync_client=True) as client:
            elsewhere = lives_elsewhere(client.read_flow_run(UUID(flow_run_id)))
    except UNREACHABLE:
        return  # known later, by `watched_flow_run`
    if elsewhere:
        print("Another worker has begun this flow run by now", flush=True)
        os._exit(0)  # anything else, and this worker would call the run crashed that lives there


@contextmanager
def noticing_the_workers_death(stop: StopRequest, every_s: float = 0.5) -> Iterator[None]:
    """While the block runs, end its run in good order (as SIGTERM does) when the worker that started it dies,
    or has died before: nobody would supervise it."""
    # A worker may die while this process still imports: its parent is another one then, from the first look
    # on.
    worker, parent = os.environ.get(STARTED_BY, "").partition(" ")[0], os.getppid()
    orphaned = bool(worker) and worker not in {str(above.pid) for above in psutil.Process().parents()}

    def look() -> bool:
        died = orphaned or os.getppid() != parent
        if died:
            stop.ask("the death of its worker", signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return died

    with watching(look, every_s, "dphybrid-parent-guard"):
        yield


def without_tracebacks_of_user_errors() -> None:
    """Make Prefect log the message of a UserError once, as the reason of the state Failed, and no crash when
    a flow is interrupted."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_tells_more_than_the_state)


def _tells_more_than_the_state(record: logging.LogRecord) -> bool:
    if str(record.msg).startswith("Crash detected!"):  # which is logged without the exception
        return not isinstance(sys.exception(), Interrupted)
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, UserError | KeyboardInterrupt)


def _leave(flow_run_id: str, reason: str, later: bool, ending: str | None) -> None:
    """Leave an interrupted run in the state that fits, and end this process without another one; return when
    Prefect should say what it is.

    Cancelled when somebody cancelled it. Queued again after a while (later: wanted), if a worker can take it
    up; one that sees its checkpoints goes on with it. ending: one of the `ENDINGS`, for a run that nobody
    goes on with. Left as it is when it was thought dead and is another process's now.
    """
    state: State[object] | None = None
    try:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(UUID(flow_run_id))
            now = run.state.type if run.state else StateType.RUNNING
            if lives_elsewhere(run):
                # Prefect sets no state after a Pause: the run is another process's.
                raise Pause(state=run.state)
            if now in (StateType.CANCELLING, StateType.CANCELLED):
                state = Cancelled(message=reason)
            elif ending is not None:
                state = Completed(name=ending, message=reason)
            elif later and now == StateType.RUNNING and run.deployment_id and run.work_queue_id:
                when = datetime.now(UTC) + timedelta(seconds=load_settings().requeue_after_s)
                state = AwaitingRetry(scheduled_time=when, message=reason)
            if state is not None:
                client.set_flow_run_state(run.id, state, force=True)
    except Pause:
        raise
    except UNREACHABLE as error:
        # Without a word to Prefect, which would try for long, and then call it crashed: its worker sees that
        # the process ended so, and queues the run.
        print(
            f"{reason}\nPrefect's server is away ({error}); the run is queued again when it is back",
            flush=True,
        )
        os._exit(128 + signal.SIGTERM)
    if state is not None:
        raise Pause(state=state)  # after which Prefect sets no state of its own, and the process ends with 0
