"""One run on several machines. The flow run on the first machine starts a flow run `join-hybrid` on each of
the other machines, which starts ranks there.

The flow runs watch each other's states through Prefect. When one ends, all end; the first one is queued again
and continues with the machines that are online by then. The ranks find each other through files in the run's
folder, which all machines share, and then communicate through torch only. The other machines run `follow`: it
checks that they have the same data and versions as the first machine, leases devices, starts ranks, and ends
when the first machine does.
"""

import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, Worker, WorkerStatus
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Cancelling, Completed, Running
from pydantic import BaseModel, ConfigDict

from dphybrid.cluster.engine import difference, versions
from dphybrid.cluster.launch import Meeting, address_towards, train_in_ranks
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.orchestration.queueing import (
    DELETED,
    MACHINE_TAG,
    MAX_RUNS,
    OWNER_LABEL,
    REFUSED,
    UNREACHABLE,
    WORKER,
    WORKER_LABEL,
    ended,
    num_starts,
    set_state,
    shown_waiting,
)
from dphybrid.recipes.configs import apply_overrides
from dphybrid.run.folder import Run, read_run
from dphybrid.run.leasing import expected_devices, giving_way, leased_devices
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
"""Grace period: how long a machine may continue after another one has left."""
_ACTIVE = [StateType.RUNNING, StateType.PENDING]


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


def other_workers(nodes: int, machines: Sequence[str], settings: Settings, stop: StopRequest) -> list[str]:
    """Return the workers that take part besides this flow run's own: the named ones, or the least busy ones
    that are online. Waits for workers that the pool knows and that are offline.

    Raises UserError that names what is missing: at once if the pool does not know enough workers, else after
    `cluster_wait_s`. Raises Interrupted when `stop` was asked.
    """
    own = os.environ.get(WORKER)
    if own is None or runtime.flow_run.id is None:
        raise UserError(
            f"nodes={nodes}: several machines need a worker on each; start `dphybrid worker` there, and "
            "queue this run with `prefect deployment run`"
        )
    wanted = [name for name in dict.fromkeys(machines) if name != own]
    if machines and len(wanted) != nodes - 1:
        raise UserError(
            f"nodes={nodes} and machines {', '.join(machines)}: besides {own}, whose worker took this run, "
            f"these are {len(wanted)} others; name {nodes - 1}"
        )
    deadline, reported = time.monotonic() + settings.cluster_wait_s, False
    while True:
        stop.obey("while it waited for machines")
        pool, workers, busy = _pool()
        others = {worker.name: worker for worker in workers if worker.name != own}
        unknown = [name for name in wanted if name not in others]
        if unknown or len(others) < nodes - 1:
            raise UserError(
                f"nodes={nodes}: pool {pool} has {f'no worker {unknown[0]}; it has ' if unknown else 'only '}"
                f"{', '.join(sorted({own, *others}))}; start `dphybrid worker` on each machine"
            )
        online = [name for name in wanted or others if others[name].status == WorkerStatus.ONLINE]
        if len(online) >= nodes - 1:
            return sorted(online, key=lambda name: (busy[name], name))[: nodes - 1]
        offline = ", ".join(_last_heard(others[name]) for name in wanted or others if name not in online)
        if time.monotonic() > deadline:
            raise UserError(
                f"nodes={nodes}: after {settings.cluster_wait_s:g} s these workers are still offline: "
                f"{offline}; start them, or wait longer with DPHYBRID_CLUSTER_WAIT_S"
            )
        if not reported:
            print(f"Waiting for machines: {offline}", flush=True)
        reported = True
        time.sleep(_LOOK_EVERY_S)


def _pool() -> tuple[str, list[Worker], Counter[str]]:
    """Return the pool of this flow run, its workers, and the number of active runs by worker name."""
    with get_client(sync_client=True) as client:
        pool = client.read_flow_run(UUID(runtime.flow_run.id)).work_pool_name or ""
        workers = client.read_workers_for_work_pool(pool)
        active = client.read_flow_runs(
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ACTIVE))
            ),
        )
    return pool, workers, Counter(str(run.labels.get(WORKER_LABEL)) for run in active)


def _last_heard(worker: Worker) -> str:
    heard = worker.last_heartbeat_time
    return f"{worker.name} (last heartbeat: {f'{heard:%Y-%m-%d %H:%M} UTC' if heard else 'never'})"


@contextmanager
def gathered(
    others: Sequence[str], run_folder: str, settings: Settings, join: str = _JOIN
) -> Iterator[Meeting]:
    """In the first machine's flow run: let the workers `others` join, and end their flow runs when the block
    ends.

    Yields the meeting of the ranks. Its `look` raises UserError, with name and reason, when a machine fails
    or does not join within `cluster_wait_s`; and Interrupted, so that the run continues later, when a machine
    crashed or left. join: the deployment of the other machines' flow runs.
    """
    folder = Path(run_folder)
    host = urlsplit(PREFECT_API_URL.value() or "").hostname or "127.0.0.1"
    address = address_towards(host, settings.cluster_address)
    with get_client(sync_client=True) as client:
        head = client.read_flow_run(UUID(runtime.flow_run.id))
    starts = num_starts(head)
    seat = Seat(
        head=head.id,
        home=str(head.labels.get(OWNER_LABEL, "")),
        host=platform.node(),
        run=folder.name,
        job=f"{head.id}-{starts}",
        nodes=1 + len(others),
        node=0,
        address=address,
        wait_s=settings.cluster_wait_s,
        versions=versions(),
    )
    # Written before the other machines start: one that does not find the seat here does not share the folder.
    write_text(folder / SEAT, seat.model_dump_json())
    followers = _Followers(seat, starts)
    try:
        for node, name in enumerate(others, start=1):
            followers.call(name, node, join)
        print(f"Machines: this one at {address}, and {', '.join(others)}", flush=True)
        with watching(followers.look, _LOOK_EVERY_S, "dphybrid-machines"):
            yield Meeting(seat.job, seat.nodes, 0, address, followers.obey)
    finally:
        followers.let_go()
        (folder / SEAT).unlink(missing_ok=True)


class _Followers:
    """The other machines' flow runs, as the first machine sees them. starts: how often its own flow run was
    started."""

    def __init__(self, seat: Seat, starts: int) -> None:
        self._seat, self._starts = seat, starts
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

    def let_go(self) -> None:
        """Wait for the other machines' flow runs, which end once their ranks have ended; cancel those that do
        not end in time."""
        deadline, why = time.monotonic() + _LEAVE_S, "the run's first machine has ended its part"
        try:
            while any(not state.is_final() for state in self._states().values()):
                if time.monotonic() > deadline or self._verdict is not None:
                    break
                time.sleep(0.5)
            with get_client(sync_client=True) as client:
                for run_id in self._runs.values():
                    now = _state_of(client, run_id)
                    if now is None or now.is_final() or now.type == StateType.CANCELLING:
                        continue
                    running = now.type == StateType.RUNNING
                    # Only a running one has a process, which Cancelling asks to stop.
                    ending: State = Cancelling(message=why) if running else Cancelled(message=why)
                    client.set_flow_run_state(run_id, ending, force=True)
        except REFUSED as error:  # no harm: they watch this flow run as well
            print(f"Prefect could not stop the other machines ({error}); they see this run's end and stop")

    def _states(self) -> dict[str, State]:
        with get_client(sync_client=True) as client:
            states = {name: _state_of(client, run_id) for name, run_id in self._runs.items()}
        return {name: state for name, state in states.items() if state is not None}

    def _judged(self, states: dict[str, State]) -> UserError | Interrupted | None:
        missing, now = [], time.monotonic()
        for name, state in states.items():
            shown = f"{state.name}{': ' + state.message if state.message else ''}"
            if state.type == StateType.FAILED or (
                state.type == StateType.CRASHED and self._starts >= MAX_RUNS
            ):
                return UserError(f"machine {name}: its flow run is {shown}")
            if state.type == StateType.CRASHED:
                return Interrupted(f"stopped by the crash of machine {name} ({shown})", requeue=True)
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


@contextmanager
def _seated(seat: Seat, stop: StopRequest) -> Iterator[tuple[Run, Meeting]]:
    """In another machine's flow run: lease the devices that the run wants; yield the run and its meeting.

    stop: asked when the first machine's flow run ends or is started again; if the ranks do not end within a
    grace period, the meeting's `look` raises Interrupted. Raises UserError when this machine's data folder or
    versions differ from the first machine's.
    """
    settings, head = load_settings(), _Head(seat, stop)
    head.look()
    stop.obey("before it joined")
    run = same_run(seat, settings)
    ranks = run.config.cluster.ranks // seat.nodes
    with watching(head.look, _LOOK_EVERY_S, "dphybrid-first-machine"), ExitStack() as held:
        with shown_waiting(runtime.flow_run.id) as report:
            leased = leased_devices(
                run.config, settings, run=seat.run, replicas=ranks, on_wait=report, stop=stop
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
            yield run, Meeting(seat.job, seat.nodes, seat.node, address, head.obey)


def follow(seat: Seat, stop: StopRequest) -> State:
    """Take part in another machine's run: start this machine's ranks; return the flow run's final state."""
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
        """Check the first machine's flow run once; return whether its part is over."""
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
                if run.labels.get(OWNER_LABEL) == self._seat.home:
                    return False
                name = "started again"  # it will invite machines again, with new seats
            else:
                name = state.name if state is not None and state.name else "gone"
        self._over = time.monotonic()
        self._stop.ask(f"the run's first machine, {self._seat.host} (its flow run is {name})")
        return True

    def obey(self) -> None:
        if self._over is not None and time.monotonic() - self._over > _LEAVE_S:
            self._stop.obey("and its ranks did not stop in time")


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
