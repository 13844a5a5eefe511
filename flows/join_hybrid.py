"""The flow `join-hybrid`: this machine's part of a run over several, which the run's first machine starts."""

from prefect import flow
from prefect.client.schemas.objects import State

from dphybrid.orchestration.machines import LEFT, Seat, follow
from dphybrid.orchestration.supervised import supervised
from dphybrid.util.errors import UserError


@flow(name="join-hybrid", log_prints=True)
def join_hybrid(seat: Seat | None = None) -> State:
    """Be one of the other machines of a run with `nodes` above 1.

    Args:
        seat: What the run's first machine says of it. Nobody fills it in by hand.
    """
    if seat is None:
        raise UserError(
            "join-hybrid is started by a run over several machines; queue that one: `prefect deployment run "
            "train-cluster`"
        )
    with supervised(ending=LEFT) as stop:
        return follow(seat, stop)
