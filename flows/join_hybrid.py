"""The flow `join-hybrid`: one machine's part of a run over several. The run's first machine starts it."""

from prefect import flow
from prefect.client.schemas.objects import State

from dphybrid.orchestration.machines import LEFT, Seat, follow
from dphybrid.orchestration.supervised import supervised
from dphybrid.util.errors import UserError


@flow(name="join-hybrid", log_prints=True)
def join_hybrid(seat: Seat | None = None) -> State:
    """Take part in a run over several machines. The run's first machine starts this flow.

    Args:
        seat: Filled in by the run's first machine; leave it alone.
    """
    if seat is None:
        raise UserError(
            "join-hybrid is started by a run over several machines; start that run instead: `prefect "
            "deployment run train-cluster`"
        )
    with supervised(ending=LEFT) as stop:
        return follow(seat, stop)
