"""Which flow runs live on this machine: a file a run, locked by its process, so that the kernel says when it
is dead.

A worker that finds the file of a dead run queues the run again, whatever killed it: a `kill -9`, the
out-of-memory killer, or the worker's own death, of which no server would ever be told. A run has one home:
whoever starts it writes the same words into its file and into its record on the server (label `HOME`), and
only the home whose words stand there queues it again. The files lie in a folder of this user alone.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound, Pause
from prefect.states import AwaitingRetry, Cancelled, Crashed

from dphybrid.config.settings import load_settings
from dphybrid.gpus import lease_folder
from dphybrid.orchestration.queueing import BEGUN, HOME, STARTED_BY, UNREACHABLE
from dphybrid.util.errors import UserError
from dphybrid.util.locks import is_locked, lock, stands_at
from dphybrid.util.shared_files import OddFileError, open_regular, opened, own_folder, read_text, write_page
from dphybrid.util.stop import StopRequest
from dphybrid.util.watching import watching

_SETTLE_S = 8.0
"""How long a run must have been in the state that says it lives, or has crashed."""
SILENT = "no heartbeat: its machine died"
"""What the automation of `dphybrid.orchestration.setup` writes on a run."""
SILENT_FOR = timedelta(seconds=200)
"""Silence after which it does; at least three heartbeats, or living runs would be begun twice."""
_STUCK_S = 120.0
"""How long the start of a process may take."""
_FILE = re.compile(r"flow-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.run")
MAX_RUNS = 10
"""A flow run that was begun so often is not queued again: it may be what kills its machine."""


def live_folder() -> Path:
    """Return the folder of this user's live runs on this machine. Raises UserError when somebody else has
    taken its place."""
    try:
        return own_folder(lease_folder(load_settings().lease_dir) / f"runs-{os.getuid()}")
    except OddFileError as error:
        raise UserError(
            f"{error}; remove it, as root, or set DPHYBRID_LEASE_DIR to another folder"
        ) from error


def run_file(flow_run_id: str) -> Path:
    """Return the file of a flow run on this machine."""
    return live_folder() / f"flow-{flow_run_id}.run"


def mark_start(flow_run_id: str) -> str:
    """Write into the run's file that this process starts it; return these words, for `HOME`, and for its
    process as `STARTED_BY`."""
    started_by = f"{os.getpid()} {uuid4()} {socket.gethostname()}"
    with opened(run_file(flow_run_id), os.O_RDWR | os.O_CREAT, own=True) as handle:
        write_page(handle, started_by)
    return started_by


def start_labels(run: FlowRun, started_by: str) -> dict[str, bool | int | float | str]:
    """Return the labels that say that a run is started once more, and by whom."""
    return {HOME: started_by, BEGUN: num_starts(run) + 1}


def num_starts(run: FlowRun) -> int:
    """Return how often a run was started."""
    starts = run.labels.get(BEGUN)
    return starts if isinstance(starts, int) else 0


def _is_orphan() -> bool:
    """Has the worker that started this process died? Then this is among the children of another one."""
    worker = os.environ.get(STARTED_BY, "").partition(" ")[0]
    return bool(worker) and worker not in {str(ancestor.pid) for ancestor in psutil.Process().parents()}


@contextmanager
def alive_here(flow_run_id: str) -> Iterator[None]:
    """Mark the flow run as living in this process while the block runs.

    A worker may have started the run anew before this process has ended: the file is left for that start
    then. Ends this process when another machine's worker has started the run since.
    """
    file = run_file(flow_run_id)
    with _locked(file):
        _settle_in(flow_run_id, file)
        queued = False
        try:
            yield
        except Pause as left:
            # The file of a run that is queued again stays until its next start: killed in its last moments,
            # after it said so, its process would be called crashed, and nobody would queue the run.
            queued = left.state is not None and left.state.is_scheduled()
            raise
        finally:
            if not queued and _start_of(file) in ("", os.environ.get(STARTED_BY, _start_of(file))):
                file.unlink(missing_ok=True)


def _settle_in(flow_run_id: str, file: Path) -> None:
    """Be the run's home, or find that it has another one by now."""
    own = os.environ.get(STARTED_BY)
    try:
        run_id = UUID(flow_run_id)
        with get_client(sync_client=True) as client:
            if own is None:  # a worker of another kind started it
                client.update_flow_run_labels(
                    run_id, start_labels(client.read_flow_run(run_id), mark_start(flow_run_id))
                )
                return
            home = client.read_flow_run(run_id).labels.get(HOME, own)
    except (*UNREACHABLE, ValueError):
        return  # known later, by `watched_flow_run`
    if home != own:
        print(f"{file.stem}: is at home on {str(home).split()[-1]} by now", flush=True)
        os._exit(0)  # anything else, and this worker would call the run crashed that lives there


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a file locked; wait for another process of the same run, which is about to end. The end of an
    orphan: the other one has the run."""
    # Again from the file's opening when its last holder removed it: the name may be another file's by then.
    while True:
        with opened(file, os.O_RDWR | os.O_CREAT, own=True) as handle:
            while not lock(handle):
                if _is_orphan():
                    print(
                        f"{file.stem}: the worker that started this process is dead, and another process "
                        "has the run",
                        flush=True,
                    )
                    os._exit(128 + signal.SIGTERM)
                time.sleep(0.2)
            if stands_at(file, handle):
                yield
                return


def queue_dead_runs(told: set[str]) -> list[str]:
    """Queue the runs again whose process died on this machine; return a line for each. Waits for no server
    that is away.

    told: names of files that are none of ours and were told already; gets those found now, each with a line.
    """
    lines = []
    for file in sorted(live_folder().iterdir()):
        try:
            match = _FILE.fullmatch(file.name)
            if match is None:
                raise OddFileError(f"{file}: is not a file of a live run")
            if _is_locked(file):
                continue
            with get_client(sync_client=True) as client:
                line = _queue(client, file, UUID(match[1]))
            if line is not None:
                file.unlink(missing_ok=True)
                lines += [line] if line else []
        except FileNotFoundError:
            continue  # its run has ended meanwhile
        except OSError as error:  # odd, or not to be opened
            if file.name not in told:
                told.add(file.name)
                lines.append(f"{error}; it is left alone")
        except UNREACHABLE:
            break
    return lines


def _queue(client: SyncPrefectClient, file: Path, flow_run_id: UUID) -> str | None:
    """Return what was done, "" when there is nothing to do, or None to look again later."""
    worker = _start_of(file).partition(" ")[0]
    try:
        run = client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        return ""
    if run.labels.get(HOME) != _start_of(file):
        # Another home; or this one, which is about to tell the server so.
        return None if time.time() - file.lstat().st_mtime < _STUCK_S else ""
    if run.state is None or run.state.type == StateType.SCHEDULED or _is_locked(file):
        return None  # it is about to start, perhaps here
    if datetime.now(UTC) - run.state.timestamp < timedelta(seconds=_SETTLE_S):
        # it has just begun, and is about to lock its file; or its worker is about to say what became of it,
        # or takes it, and is about to replace the words of its last start
        return None
    if run.state.type == StateType.PENDING:
        if not worker.isdecimal() or psutil.pid_exists(int(worker)):
            return None
        return _again(client, run, "its worker died before it had begun")
    if run.state.type == StateType.CANCELLING:
        client.set_flow_run_state(flow_run_id, Cancelled(message="its process is dead"), force=True)
        return f"flow run {run.name}: cancelled, its process is dead"
    if run.state.type not in (StateType.RUNNING, StateType.CRASHED) or run.deployment_id is None:
        return ""
    if (starts := num_starts(run)) >= MAX_RUNS:
        client.set_flow_run_state(
            flow_run_id, Crashed(message=f"its process died, and it was begun {starts} times"), force=True
        )
        return f"flow run {run.name}: died after {starts} beginnings; not queued again"
    return _again(client, run, "its process died")


def _again(client: SyncPrefectClient, run: FlowRun, why: str) -> str:
    when = datetime.now(UTC) + timedelta(seconds=1)
    client.set_flow_run_state(
        run.id, AwaitingRetry(scheduled_time=when, message=f"{why}; queued again"), force=True
    )
    return f"flow run {run.name}: {why}; queued again"


def queue_lost_runs(pool: str) -> list[str]:
    """Queue the runs of a pool again whose machine died, or whose worker before they began, wherever that
    was; return a line for each."""
    before = datetime.now(UTC) - timedelta(seconds=_STUCK_S)
    try:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs(
                work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
                flow_run_filter=FlowRunFilter(
                    state=FlowRunFilterState(
                        type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.CRASHED])
                    ),
                    tags=FlowRunFilterTags(all_=["dphybrid"]),
                ),
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            )
            lines = []
            for run in runs:
                assert run.state is not None  # the filter asks for one
                if run.state.type == StateType.PENDING and run.state.timestamp < before:
                    lines.append(_again(client, run, "it did not begin"))
                elif (
                    run.state.type == StateType.CRASHED
                    and run.state.message == SILENT
                    and num_starts(run) < MAX_RUNS
                ):
                    lines.append(_again(client, run, SILENT))
            return lines
    except UNREACHABLE:
        return []


def _start_of(file: Path) -> str:
    """Return who started a run last, "" where its file does not tell."""
    try:
        handle = open_regular(file, own=True)
    except OSError:
        return ""
    try:
        return read_text(handle)
    finally:
        os.close(handle)


def _is_locked(file: Path) -> bool:
    """Does a process hold the file? Raises OddFileError for another user's file, FileNotFoundError when it is
    gone."""
    with opened(file, own=True) as handle:
        return is_locked(handle)


@contextmanager
def noticing_the_workers_death(stop: StopRequest, every_s: float = 0.5) -> Iterator[None]:
    """While the block runs, end its run in good order (as SIGTERM does) when the worker that started it dies,
    or has died before: nobody would supervise it."""
    # A worker may die while this process still imports: its parent is another one then, from the first look
    # on.
    parent, orphaned = os.getppid(), _is_orphan()

    def look() -> bool:
        died = orphaned or os.getppid() != parent
        if died:
            stop.ask("the death of its worker", signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return died

    with watching(look, every_s, "dphybrid-parent-guard"):
        yield
