"""Supervise a deployment's flow run: stop it when its worker dies or another worker has started it again, and
queue it again when it had to stop early."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.states import AwaitingRetry, Cancelled

from dphybrid.orchestration.queueing import (
    DELETED,
    STARTED_BY,
    UNREACHABLE,
    alive_again,
    owned_elsewhere,
)
from dphybrid.util.alive import lives, process_name
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals, watching

_ASK_EVERY_S = 15.0
AGAIN_AFTER_S = 60.0
"""How long a run that gave its GPUs back waits before it asks for them again."""
_ENDED = {StateType.CANCELLING, StateType.CANCELLED, StateType.CRASHED, StateType.PAUSED}


@contextmanager
def supervised() -> Iterator[StopRequest]:
    """Supervise the current flow run while the block runs. Yields its stop request, which signals, its
    cancelling in Prefect and the death of its worker set off.

    A run that is interrupted (to give way, by SIGTERM, or because its worker died) and not cancelled is
    queued again.
    """
    without_tracebacks_of_user_errors()
    flow_run_id = runtime.flow_run.id if runtime.deployment.id else None
    stop = StopRequest()
    with ExitStack() as held:
        if flow_run_id is not None:  # a worker started it
            _check_owned(flow_run_id)
            held.enter_context(watching_worker(stop))
        try:
            with stop_signals(stop, at_once=True), watched_flow_run(runtime.flow_run.id, stop):
                yield stop
        except Interrupted as interruption:
            if flow_run_id is None:
                raise  # no worker looks at how this process ends: its command reports the checkpoint
            asked_to_end = interruption.signal_number == signal.SIGTERM
            after_s = AGAIN_AFTER_S if interruption.requeue else 0.0 if asked_to_end else None
            _leave(flow_run_id, str(interruption), after_s)
            if asked_to_end:
                raise TerminationSignal(signal=signal.SIGTERM) from interruption
            raise
        except TerminationSignal as ended:  # Prefect's handler: the signal came while `stop_signals` was off
            if flow_run_id is not None:
                _leave(flow_run_id, f"stopped by {ended!r}", 0.0)
            raise


@contextmanager
def watched_flow_run(flow_run_id: str, stop: StopRequest, every_s: float = _ASK_EVERY_S) -> Iterator[None]:
    """While the block runs, ask its run to stop once the flow run is cancelled, deleted, or owned by another
    process. A run that was thought dead says that it lives.

    Prefect's own observer ends for good after an outage of half a minute; a run cancelled later would
    continue to train.
    """

    def look() -> bool:
        try:
            # With settings of its own, so that Prefect makes a new client: one that was connected once
            # retries for a minute when the server is unreachable.
            with get_client(httpx_settings={}, sync_client=True) as client:
                run = client.read_flow_run(UUID(flow_run_id))
                alive = None if owned_elsewhere(run) else alive_again(run)
                if alive is not None:
                    client.set_flow_run_state(run.id, alive, force=True)
                    return False
        except ObjectNotFound:
            stop.ask(f"Prefect ({DELETED})")
            return True
        except UNREACHABLE:
            return False
        if run.state is not None and run.state.type in _ENDED:
            stop.ask(f"Prefect (flow run {run.state.name})")
            return True
        if owned_elsewhere(run):
            stop.ask("Prefect (the flow run was considered dead and was started again elsewhere)")
            return True
        return False

    with watching(look, every_s, "dphybrid-flow-guard", end_s=0):
        yield


def _check_owned(flow_run_id: str) -> None:
    """Exit if the flow run was deleted, or if another worker has started it: a process that starts too slowly
    counts as dead."""
    try:
        with get_client(sync_client=True) as client:
            if not owned_elsewhere(client.read_flow_run(UUID(flow_run_id))):
                return
        why = "Another worker has started this flow run meanwhile"
    except ObjectNotFound:
        why = DELETED.capitalize()
    except UNREACHABLE:
        return  # `watched_flow_run` will notice later
    print(f"{why}; this process ends", flush=True)
    os._exit(0)  # with another code, this process's worker would mark the other worker's run as crashed


@contextmanager
def watching_worker(stop: StopRequest, every_s: float = 0.5) -> Iterator[None]:
    """While the block runs, stop its run as SIGTERM does when the worker that started it dies, or has died:
    nobody would supervise the run."""
    # Not the parent's: a worker may die while this process still imports, and another one is the parent then.
    worker = os.environ.get(STARTED_BY, "").partition(" ")[0] or process_name(os.getppid())

    def look() -> bool:
        if lives(worker):
            return False
        stop.ask("the death of its worker", signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    with watching(look, every_s, "dphybrid-parent-guard"):
        yield


def without_tracebacks_of_user_errors() -> None:
    """Make Prefect log the message of a UserError once, as the reason of the state Failed; and log no crash
    when a flow is interrupted."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_adds_to_the_state)


def _adds_to_the_state(record: logging.LogRecord) -> bool:
    if str(record.msg).startswith("Crash detected!"):  # Prefect logs this one without exc_info
        return not isinstance(sys.exception(), Interrupted)
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, UserError | KeyboardInterrupt)


def _leave(flow_run_id: str, reason: str, after_s: float | None) -> None:
    """Set the final or queued state of an interrupted flow run, and raise Pause so that Prefect sets no other
    one; return without a change if Prefect should choose the state.

    A cancelled or deleted run becomes Cancelled, and a paused one stays so. If a worker can take it, it is
    queued again after `after_s` seconds; None: it is not. A run that another process owns by now is left as
    it is.
    """
    state: State[object] | None = None
    try:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(UUID(flow_run_id))
            now = run.state.type if run.state else StateType.RUNNING
            if owned_elsewhere(run) or now == StateType.PAUSED:
                # A paused run has written its checkpoint and freed its GPUs; Resume queues it.
                state = run.state
            elif now in (StateType.CANCELLING, StateType.CANCELLED):
                state = Cancelled(message=reason)
            elif after_s is not None and now == StateType.RUNNING and run.deployment_id and run.work_queue_id:
                due = datetime.now(UTC) + timedelta(seconds=after_s)
                state = AwaitingRetry(scheduled_time=due, message=reason)
            if state is not None and state is not run.state:
                client.set_flow_run_state(run.id, state, force=True)
    except ObjectNotFound:
        state = Cancelled(message=reason)
    except UNREACHABLE as error:
        # Exit at once: Prefect would retry for long and then mark the run as crashed. The worker sees this
        # exit code and queues the run.
        print(f"{reason}\nPrefect's server does not take this state: {error}", flush=True)
        os._exit(128 + signal.SIGTERM)
    if state is not None:
        raise Pause(state=state)  # Prefect then sets no state of its own, and the process exits with 0
