"""Another machine's part of a run over several (`join-hybrid`): it takes the seat that the first one's flow
run gives it, looks whether both see the same, leases what the run wants, and leaves when the first one does.
"""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed, Running
from pydantic import BaseModel, ConfigDict

from dphybrid.cluster.launch import Meeting, address_towards, train_in_ranks
from dphybrid.cluster.refusals import difference, versions
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus.leasing import leased_devices
from dphybrid.gpus.politeness import giving_way
from dphybrid.orchestration.queueing import HOME, UNREACHABLE, WORKER, ended, set_state, shown_waiting
from dphybrid.run.folder import Run, read_run
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest, stop_signals
from dphybrid.util.watching import watching

JOINED = "Joined"
"""Name of the state of a machine's flow run that starts its ranks."""
LEFT = "Left"
SEAT = ".machines"
"""File of a run's folder that holds the seat: a machine that sees it sees the folder, and nobody else names a
place to meet."""
LOOK_EVERY_S = 2.0
LEAVE_S = 10.0
"""How long a machine may go on after another one has left."""


class Seat(BaseModel):
    """What the first machine's flow run tells another one's."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    head: UUID
    """The first machine's flow run."""
    home: str
    """Which start of it: a later one has other seats."""
    host: str
    """Name of the first machine."""
    run: str
    """The run, a folder of the data folder's runs."""
    job: str
    """Name of this start of the run's ranks."""
    nodes: int
    node: int
    """Number of the machine; the first one is 0."""
    address: str
    """The first machine's, as its ranks listen at it."""
    wait_s: float
    versions: dict[str, str]


@contextmanager
def _seated(seat: Seat, stop: StopRequest) -> Iterator[tuple[Run, Meeting]]:
    """In another machine's flow run: have the devices that the run wants, leased, and a place in its meeting.

    stop: is asked when the first machine's flow run ends, or begins anew; a while later `look` of the meeting
    raises Interrupted. Raises UserError when this machine does not see what the first one does.
    """
    settings, head = load_settings(), _Head(seat, stop)
    head.look()
    stop.obey("before it joined")
    run = same_run(seat, settings)
    ranks = run.config.cluster.ranks // seat.nodes
    with watching(head.look, LOOK_EVERY_S, "dphybrid-first-machine"), ExitStack() as held:
        with shown_waiting(runtime.flow_run.id) as tell:
            leased = leased_devices(
                run.config, settings, run=seat.run, replicas=ranks, on_wait=tell, stop=stop
            )
            devices = held.enter_context(leased)
        if devices.text != run.page.devices:
            raise UserError(f"devices: {devices.text} here, {run.page.devices} on {seat.host}; name as many")
        with giving_way(devices, settings, stop), stop_signals(stop):
            address = address_towards(seat.address, settings.cluster_address)
            set_state(runtime.flow_run.id, Running(name=JOINED, message=f"its ranks listen at {address}"))
            yield run, Meeting(seat.job, seat.nodes, seat.node, address, head.obey)


def follow(seat: Seat, stop: StopRequest) -> State:
    """Be one of the other machines of a run: start its ranks here; return the state to end in."""
    with _seated(seat, stop) as (run, meeting):
        outcome = train_in_ranks(run.folder, run.config.cluster.ranks, load_settings(), stop, meeting)
    stop.obey()
    if outcome.state == "trained":
        return Completed(message=f"run {seat.run} is trained")
    return ended(LEFT, outcome.words)


class _Head:
    """The first machine's flow run, as another machine sees it."""

    def __init__(self, seat: Seat, stop: StopRequest) -> None:
        self._seat, self._stop = seat, stop
        self._over: float | None = None

    def look(self) -> bool:
        """Look once; is the work together over?"""
        try:
            with get_client(sync_client=True) as client:
                run = client.read_flow_run(self._seat.head)
        except ObjectNotFound:
            name = "deleted"
        except UNREACHABLE:
            return False
        else:
            state = run.state
            if state is not None and state.type == StateType.RUNNING:
                if run.labels.get(HOME) == self._seat.home:
                    return False
                name = "begun anew"
            else:
                name = state.name if state is not None and state.name else "gone"
        self._over = time.monotonic()
        self._stop.ask(f"the run's first machine, {self._seat.host} (its flow run is {name})")
        return True

    def obey(self) -> None:
        if self._over is not None and time.monotonic() - self._over > LEAVE_S:
            self._stop.obey("which its ranks did not heed in time")


def same_run(seat: Seat, settings: Settings) -> Run:
    """Return the run of a seat as this machine sees it. Raises UserError when that is not what the first one
    sees."""
    here, folder = os.environ.get(WORKER) or platform.node(), settings.runs_dir / Path(seat.run).name
    remedy = f"give it the data folder of {seat.host}, shared, under the same path (DPHYBRID_DATA_DIR)"
    try:
        told = (folder / SEAT).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"machine {here} does not see {folder / SEAT} ({error.strerror}); {remedy}"
        ) from error
    # not by their texts: the server orders names anew
    if Seat.model_validate_json(told) != seat.model_copy(update={"node": 0}):
        raise UserError(f"machine {here} reads in {folder / SEAT} something else than it was told; {remedy}")
    run = read_run(folder, settings)
    if not Path(run.page.prepared).is_dir():
        raise UserError(f"machine {here} does not see the prepared data {run.page.prepared}; {remedy}")
    if found := difference(f"machine {here}", versions(), seat.host, seat.versions):
        raise UserError(found)
    if seat.address.startswith("127.") and platform.node() != seat.host:
        raise UserError(
            f"{seat.host}'s ranks listen at {seat.address}, which {here} cannot reach; set "
            f"DPHYBRID_CLUSTER_ADDRESS on {seat.host} to its address in your network"
        )
    return run
