"""Watches the flow run's own state while training: Prefect's observer dies after a short outage, and a
cancelled run would train on."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.schemas.objects import StateType

from dphybrid.orchestration.clients import client_for_threads
from dphybrid.orchestration.queueing import UNREACHABLE, lives_elsewhere
from dphybrid.util.stop import StopRequest
from dphybrid.util.watching import watching

_ASK_EVERY_S = 15.0
_ENDED = {StateType.CANCELLING, StateType.CANCELLED, StateType.CRASHED}


@contextmanager
def watched_flow_run(
    flow_run_id: str | None, stop: StopRequest, every_s: float = _ASK_EVERY_S
) -> Iterator[None]:
    """While the block runs, ask its run to stop once the flow run is cancelled or was given up. None: nothing
    to watch."""
    if flow_run_id is None:
        yield
        return

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
