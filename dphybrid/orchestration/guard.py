"""Watches the flow run's own state while training: Prefect's observer dies after a short outage, and a cancelled run would train on."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext

from dphybrid.orchestration.queueing import UNREACHABLE
from dphybrid.util.stop import StopRequest
from dphybrid.util.watching import watching

ASK_EVERY_S = 15.0
_GIVEN_AWAY = {StateType.SCHEDULED, StateType.PENDING}
_ENDED = {StateType.CANCELLING, StateType.CANCELLED, StateType.CRASHED}


@contextmanager
def watched_flow_run(flow_run_id: str | None, stop: StopRequest, every_s: float = ASK_EVERY_S) -> Iterator[None]:
    """While the block runs, ask its run to stop once the flow run is cancelled or was given up. None: nothing to watch."""
    if flow_run_id is None:
        yield
        return
    context = FlowRunContext.get()
    begun = context.flow_run.run_count if context and context.flow_run else 0

    def look() -> bool:
        try:
            # A new client each time: one that has been connected retries for a minute when the server is away.
            with get_client(sync_client=True) as client:
                run = client.read_flow_run(UUID(flow_run_id))
        except UNREACHABLE:
            return False
        if run.state is not None and run.state.type in _ENDED:
            stop.ask(f"Prefect (flow run {run.state.name})")
            return True
        if begun and (run.run_count > begun or (run.state and run.state.type in _GIVEN_AWAY)):
            stop.ask("Prefect (the flow run was thought dead, and begun again elsewhere)")
            return True
        return False

    with watching(look, every_s, "dphybrid-flow-guard", end_s=0):
        yield
