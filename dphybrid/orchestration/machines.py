"""One run on several machines. The flow run on the first machine starts a flow run `join-hybrid` on each of
the machines that are named besides it, which starts ranks there.

The ranks and their starters meet in the run's folder, which all machines share (`dphybrid.cluster.launch`).
The flow runs watch each other's states through Prefect: when one ends, all end; the first one is queued again
and continues.
"""

import ipaddress
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Running
from pydantic import BaseModel, ConfigDict

from dphybrid.cluster.engine import difference, versions
from dphybrid.cluster.launch import LOOPBACK, Meeting, train_in_ranks
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus.devices import expected_devices, giving_way, leased_devices
from dphybrid.orchestration.queueing import (
    DELETED,
    MACHINE_TAG,
    MAX_RUNS,
    OWNER_LABEL,
    REFUSED,
    UNREACHABLE,
    WORKER,
    ended,
    num_starts,
    set_state,
    shown_waiting,
)
from dphybrid.recipes.configs import apply_overrides
from dphybrid.run.folder import Run, read_run
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.files import write_text
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals, watching

_JOIN = "join-hybrid/join-hybrid"
_JOINED = "Joined"
"""State name of another machine's flow run once it starts its ranks."""
LEFT = "Left"
SEAT = ".machines"
"""File in the run's folder that holds the first machine's seat. Another machine that finds its own seat's
values there shares the folder; only someone who may write to that folder can have invited it."""
_LOOK_EVERY_S = 2.0
_LEAVE_S = 10.0
"""Grace period: how long the first machine may continue after another one has ended."""


class Seat(BaseModel):
    """The invitation that the first machine's flow run sends to another machine's."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    head: UUID
    """Id of the first machine's flow run."""
    home: str
    """The start of that flow run, as in `OWNER_LABEL`: a later start sends new seats."""
    host: str
    """Host name of the first machine."""
    run: str
    """Name of the run's folder below the data folder's runs."""
    job: str
    """Name of this start of the run's ranks."""
    nodes: int
    node: int
    """Number of the machine that the seat is for; the first machine is 0."""
    address: str
    """Address at which the first machine's ranks listen."""
    wait_s: float
    versions: dict[str, str]


def check_nodes(config: ExperimentConfig, nodes: int) -> None:
    """Raise UserError when the config's number of ranks cannot be spread evenly over `nodes` machines."""
    if nodes > 1 and (ranks := config.cluster.ranks) % nodes:
        raise UserError(
            f"nodes={nodes} with cluster.ranks={ranks}: each machine needs the same number of ranks; use "
            f"{max(ranks // nodes, 1) * nodes}, or leave cluster.ranks out for one rank on each device"
        )


def over_machines(config: ExperimentConfig, nodes: int, settings: Settings) -> ExperimentConfig:
    """Return the config for `nodes` machines. If it sets no number of ranks, each machine gets one rank for
    each device of this machine. Raises UserError when the ranks cannot be spread evenly."""
    check_nodes(config, nodes)
    if nodes == 1 or config.cluster.ranks:
        return config
    here = len(parse_device_spec(expected_devices(config, settings)).names)
    return apply_overrides(config, [f"cluster.ranks={nodes * here}"])


def named_workers(nodes: int, machines: Sequence[str]) -> list[str]:
    """Return the workers that take part besides this flow run's own: the first `nodes` - 1 others of the
    named ones. Raises UserError if fewer are named, or the pool does not know one."""
    own = os.environ.get(WORKER)
    if own is None or runtime.flow_run.id is None:
        raise UserError(
            f"nodes={nodes}: several machines need a worker on each; start `dphybrid worker` there, and "
            "queue this run with `prefect deployment run`"
        )
    others = [name for name in dict.fromkeys(machines) if name != own][: nodes - 1]
    if len(others) < nodes - 1:
        raise UserError(
            f"nodes={nodes}: machines names {', '.join(others) or 'none'} besides {own}, whose worker took "
            f"this run; name {nodes - 1}, by their workers"
        )
    with get_client(sync_client=True) as client:
        pool = client.read_flow_run(UUID(runtime.flow_run.id)).work_pool_name or ""
        known = {worker.name for worker in client.read_workers_for_work_pool(pool)}
    for name in others:
        if name not in known:
            raise UserError(
                f"machines: pool {pool} has no worker {name}; it has {', '.join(sorted({own, *known}))}; "
                "start `dphybrid worker` on each machine"
            )
    return others


def address_towards(host: str, named: str = "") -> str:
    """Return the address at which other ranks reach this machine: `named` (DPHYBRID_CLUSTER_ADDRESS), else
    the address of the interface that leads to `host`.

    Raises UserError if that address is public, or if there is no route to `host`.
    """
    if named:
        return named
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        # Connecting a UDP socket sends nothing; it makes the kernel choose the interface. Any port will do.
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"no route to {host} ({error}); set DPHYBRID_CLUSTER_ADDRESS to this machine's address"
        ) from error
    if ipaddress.ip_address(address.partition("%")[0]).is_global:
        raise UserError(
            f"ranks would listen at the public address {address} without a password; set "
            "DPHYBRID_CLUSTER_ADDRESS to an address in a trusted network, or to this one behind a firewall"
        )
    return address


@contextmanager
def gathered(
    others: Sequence[str], run_folder: str, settings: Settings, join: str = _JOIN
) -> Iterator[Meeting]:
    """In the first machine's flow run: let the workers `others` join, and take back what they have not begun
    when the block ends.

    Yields the meeting of the ranks. Its `look` raises UserError, with name and reason, when a machine fails
    or does not join within `cluster_wait_s`; and Interrupted, so that the run continues later, when a machine
    crashed or left. join: the deployment of the other machines' flow runs.
    """
    folder = Path(run_folder)
    host = urlsplit(PREFECT_API_URL.value() or "").hostname or LOOPBACK
    address = address_towards(host, settings.cluster_address)
    with get_client(sync_client=True) as client:
        head = client.read_flow_run(UUID(runtime.flow_run.id))
    seat = Seat(
        head=head.id,
        home=str(head.labels.get(OWNER_LABEL, "")),
        host=platform.node(),
        run=folder.name,
        job=secrets.token_hex(8),
        nodes=1 + len(others),
        node=0,
        address=address,
        wait_s=settings.cluster_wait_s,
        versions=versions(),
    )
    # Written before the other machines start: one that does not find the seat here does not share the folder.
    write_text(folder / SEAT, seat.model_dump_json())
    followers = _Followers(seat, last=num_starts(head) >= MAX_RUNS)
    try:
        for node, name in enumerate(others, start=1):
            followers.call(name, node, join)
        print(f"Machines: this one at {address}, and {', '.join(others)}", flush=True)
        with watching(followers.look, _LOOK_EVERY_S, "dphybrid-machines"):
            yield Meeting(seat.job, seat.nodes, 0, address, followers.obey)
    finally:
        followers.take_back()
        (folder / SEAT).unlink(missing_ok=True)


class _Followers:
    """The other machines' flow runs, as the first machine sees them. last: whether its own flow run is not
    queued again when one of them crashes."""

    def __init__(self, seat: Seat, last: bool) -> None:
        self._seat, self._last = seat, last
        self._runs: dict[str, UUID] = {}
        self._called = time.monotonic()
        self._left: dict[str, float] = {}
        self._verdict: UserError | Interrupted | None = None

    def call(self, name: str, node: int, join: str) -> None:
        run = run_deployment(
            join,
            parameters={"seat": self._seat.model_copy(update={"node": node}).model_dump(mode="json")},
            timeout=0,
            flow_run_name=f"{self._seat.run} on {name}",
            tags=["dphybrid", MACHINE_TAG],
            # The client retries a call whose answer was lost; the key prevents a second flow run.
            idempotency_key=f"{self._seat.job}-{name}",
            work_queue_name=name,
        )
        assert isinstance(run, FlowRun)  # this is not an async flow
        self._runs[name] = run.id

    def look(self) -> bool:
        """Check the other machines' states once; return whether one of them has to end the run."""
        try:
            states = self._states()
        except UNREACHABLE:
            return False
        self._verdict = self._judged(states)
        return self._verdict is not None

    def obey(self) -> None:
        if self._verdict is not None:
            raise self._verdict

    def take_back(self) -> None:
        """Cancel the flow runs that have not begun; the others end with their ranks."""
        ending: State = Cancelled(message="the run's first machine has ended its part")
        try:
            waiting = [
                n for n, s in self._states().items() if s.type in (StateType.SCHEDULED, StateType.PENDING)
            ]
            with get_client(sync_client=True) as client:
                for name in waiting:
                    client.set_flow_run_state(self._runs[name], ending, force=True)
        except REFUSED as error:  # no harm: they look at this flow run before they begin
            print(
                f"Prefect could not cancel the other machines' flow runs ({error}); they end when they begin"
            )

    def _states(self) -> dict[str, State]:
        with get_client(sync_client=True) as client:
            states = {name: _state_of(client, run_id) for name, run_id in self._runs.items()}
        return {name: state for name, state in states.items() if state is not None}

    def _judged(self, states: dict[str, State]) -> UserError | Interrupted | None:
        missing, now = [], time.monotonic()
        for name, state in states.items():
            shown = f"{state.name}{': ' + state.message if state.message else ''}"
            if state.type == StateType.FAILED or (state.type == StateType.CRASHED and self._last):
                return UserError(f"machine {name}: its flow run is {shown}")
            if state.type == StateType.CRASHED:
                why = f"stopped by the crash of machine {name} ({shown})"
                return Interrupted(why, requeue=True, orderly=False)
            if state.is_final() or state.type == StateType.CANCELLING:
                # When training ends, another machine may be finished a moment before the ranks here.
                if now - self._left.setdefault(name, now) > _LEAVE_S:
                    return Interrupted(f"stopped by machine {name}, which left ({shown})", requeue=True)
            elif state.name != _JOINED:
                missing.append(f"{name} ({shown})")
        if missing and now - self._called > self._seat.wait_s:
            return UserError(
                f"{len(missing)} of {self._seat.nodes} machines did not join within {self._seat.wait_s:g} s: "
                f"{'; '.join(missing)}; check that their workers run and their GPUs are free, or wait longer "
                "with DPHYBRID_CLUSTER_WAIT_S"
            )
        return None


def _state_of(client: SyncPrefectClient, run_id: UUID) -> State | None:
    """Return a flow run's state; of one that was deleted, that of a cancelled one."""
    try:
        return client.read_flow_run(run_id).state
    except ObjectNotFound:
        return Cancelled(message=DELETED)


def follow(seat: Seat, stop: StopRequest) -> State:
    """Take part in another machine's run: lease the devices that it wants, and start this machine's ranks;
    return the flow run's final state.

    stop: asked when the first machine's flow run ends or is started again. Raises UserError when this
    machine's data folder, devices or versions differ from the first machine's.
    """
    settings = load_settings()

    def look() -> bool:
        over = _how_it_ended(seat)
        if over:
            stop.ask(f"the run's first machine, {seat.host} (its flow run is {over})")
        return bool(over)

    look()
    stop.obey("before it joined")
    run = same_run(seat, settings)
    ranks = run.config.cluster.ranks
    with watching(look, _LOOK_EVERY_S, "dphybrid-first-machine"), ExitStack() as held:
        with shown_waiting(runtime.flow_run.id) as report:
            here = ranks // seat.nodes
            leased = leased_devices(
                run.config, settings, run=seat.run, replicas=here, on_wait=report, stop=stop
            )
            devices = held.enter_context(leased)
        if devices.text != run.page.devices:
            raise UserError(
                f"devices: {devices.text} here, {run.page.devices} on {seat.host}; each machine needs the "
                "same devices"
            )
        with giving_way(devices, settings, stop), stop_signals(stop):
            address = address_towards(seat.address, settings.cluster_address)
            set_state(runtime.flow_run.id, Running(name=_JOINED, message=f"its ranks listen at {address}"))
            meeting = Meeting(seat.job, seat.nodes, seat.node, address)
            outcome = train_in_ranks(run.folder, ranks, settings, stop, meeting)
    stop.obey()
    if outcome.state == "trained":
        return Completed(message=f"run {seat.run} is trained")
    return ended(LEFT, outcome.words)


def _how_it_ended(seat: Seat) -> str:
    """Return how the first machine's flow run has ended, or "" if it still is the one that sent the seat."""
    try:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(seat.head)
    except ObjectNotFound:
        return "deleted"
    except UNREACHABLE:
        return ""
    if run.state is None or run.state.type != StateType.RUNNING:
        return run.state.name if run.state is not None and run.state.name else "gone"
    # A later start invites machines again, with new seats.
    return "" if run.labels.get(OWNER_LABEL) == seat.home else "started again"


def same_run(seat: Seat, settings: Settings) -> Run:
    """Return the run of a seat. Raises UserError when this machine's data folder or versions differ from the
    first machine's."""
    here, folder = os.environ.get(WORKER) or platform.node(), settings.runs_dir / Path(seat.run).name
    remedy = f"give it the data folder of {seat.host}, shared, under the same path (DPHYBRID_DATA_DIR)"
    try:
        written = (folder / SEAT).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"machine {here} does not see {folder / SEAT} ({error.strerror}); {remedy}"
        ) from error
    # Compared as objects, not as texts: Prefect's server reorders the keys of parameters.
    if Seat.model_validate_json(written) != seat.model_copy(update={"node": 0}):
        raise UserError(
            f"machine {here} finds other values in {folder / SEAT} than {seat.host} sent; {remedy}"
        )
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
