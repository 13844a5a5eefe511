"""Starts the ranks of a run on this machine by torch's elastic launcher, which restarts all of them when one
dies, here or on another machine.

The launchers of all machines meet in a file of the run's folder, and so do the ranks of each start: nothing
but the ranks' own connections listens on the network.
"""

import contextvars
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, TextIO

import psutil

from dphybrid.config.settings import Settings
from dphybrid.util.errors import UserError
from dphybrid.util.files import own_folder, write_text
from dphybrid.util.pages import Page
from dphybrid.util.stop import StopRequest, watching

_POLL_S = 0.2
_END_S = 40.0
"""How long the launcher may take to end; it kills ranks that take longer than 30 s."""
_WATCHED_S = 60
"""How much longer than `wait_s` a launcher waits for the others: `Meeting.look` knows what is missing."""
_HEARTBEAT_S = 60
"""How often a launcher tells the others that it lives: rarely, as each time makes the file a little longer,
and the other ranks notice a lost machine earlier."""

# Environment variables of a rank: who started it, the folder where ranks meet.
_PARENT = "DPHYBRID_CLUSTER_PARENT"
MEETING_PLACE = "DPHYBRID_CLUSTER_MEETING_PLACE"
LOOPBACK = "127.0.0.1"
OUTCOME = "ranks.json"

PROGRAM = "dphybrid.run.joined"
"""The module that a rank runs, with the run's folder as its argument. Tests replace it by a stand-in."""


class Outcome(Page):
    """`ranks.json`: how the ranks of a run ended. Missing if they crashed. words: the message to show."""

    state: Literal["trained", "stopped", "refused"]
    words: str = ""


@dataclass(frozen=True)
class Meeting:
    """This machine's part in a job. By default it is the only machine and starts all ranks.

    job: unique name of this start of the run. nodes: number of machines. node: index of this one. address:
    the one by which the other machines reach this one. look: called several times a second while ranks run;
    an exception from it ends them.
    """

    job: str = field(default_factory=lambda: secrets.token_hex(8))
    nodes: int = 1
    node: int = 0
    address: str = LOOPBACK
    look: Callable[[], None] = lambda: None


def rank_environment(settings: Mapping[str, object], address: str = LOOPBACK) -> dict[str, str]:
    """Return the environment variables that all ranks of this machine share: those of this process, and the
    settings.

    address: the one by which other ranks reach this machine. Ranks listen at its interface, unless this
    process's variables name another one.
    """
    values = {f"DPHYBRID_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
    known = {
        # One thread by default, like torchrun: the ranks share the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])),
        _PARENT: _identity_of(os.getpid()),
        # Otherwise the first machine's launcher listens on all interfaces, and restarted ranks hang at
        # addresses of the last start (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    for interface, addresses in psutil.net_if_addrs().items():
        if address in {one.address for one in addresses}:
            # On one machine always the loopback, even if these variables name the interface of a network.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                known[name] = interface if address == LOOPBACK else os.environ.get(name, interface)
            break
    return {**os.environ, **values, **known}


def train_in_ranks(
    folder: Path, ranks: int, settings: Settings, stop: StopRequest, meeting: Meeting | None
) -> Outcome:
    """Train the run of a folder with this machine's share of its ranks; return how they ended.

    meeting: the job over several machines; None: all ranks are on this one. Raises UserError if ranks died
    too often.
    """
    logs, meeting = folder / "ranks", meeting or Meeting()
    here = ranks // meeting.nodes
    print(f"Starting {here} ranks; only the first prints here, the others write to {logs}", flush=True)
    environment = rank_environment(settings.model_dump(mode="json"), meeting.address)
    restarts = settings.cluster_restarts
    program = (PROGRAM, str(folder))
    code = run_ranks(here, program, folder, environment, restarts, stop, meeting, settings.cluster_wait_s)
    if not (folder / OUTCOME).is_file():
        raise UserError(
            f"the ranks of run {folder.name} ended with exit code {code} after at most {restarts} restarts; "
            f"see their output above and in {logs}, then continue from the newest checkpoint with --resume"
        )
    return Outcome.read(folder / OUTCOME)


def run_ranks(
    count: int,
    module: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    restarts: int,
    stop: StopRequest,
    meeting: Meeting,
    wait_s: float = 600.0,
) -> int:
    """Run `python -m MODULE...` as `count` ranks on this machine until all have ended; return 0, or 1 if one
    failed after the last restart or the machines did not meet.

    The first rank prints to this process's output, the others into files in folder/ranks. environment: from
    `rank_environment`. stop: a request is passed to the ranks through a file in folder/ranks; they end with a
    checkpoint. meeting: all machines of the job must see the same folder. wait_s: how long they may take to
    meet. Raises UserError if other users could read folder/ranks.
    """
    # Launchers and ranks exchange addresses through files there, so no other user may write into it.
    logs = own_folder(folder / "ranks")
    for old in [*logs.glob("*.store"), *logs.glob("*.stop")]:
        # Only the first machine cleans up: another one could remove files that the first has just written.
        if meeting.node == 0 and not old.name.startswith(meeting.job):
            old.unlink(missing_ok=True)
    config = {
        "min_nodes": meeting.nodes,
        "max_nodes": meeting.nodes,
        "nproc_per_node": count,
        "max_restarts": restarts,
        "monitor_interval": _POLL_S,
        "run_id": meeting.job,
        "rdzv_endpoint": str(logs / f"{meeting.job}.store"),
        "rdzv_configs": {
            "store_type": "file",
            "join_timeout": int(wait_s) + _WATCHED_S,
            "keep_alive_interval": _HEARTBEAT_S,
        },
        # Only sorted by, never connected to: the first machine gets rank 0.
        "local_addr": f"machine-{meeting.node:06}",
        "log_dir": str(logs),
    }
    # In a terminal the first rank inherits it, to draw its progress bar. Otherwise its lines are piped and
    # printed here, because a flow run's log only gets what this process prints.
    piped = None if sys.stdout.isatty() else subprocess.PIPE
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "dphybrid.cluster.elastic", json.dumps(config), *module],
        env={**environment, MEETING_PLACE: str(logs)},
        # A new session: Ctrl-C reaches only this process, which asks all ranks to stop.
        start_new_session=True,
        stdout=piped,
        stderr=piped,
    )
    printing, stop_file = _print_lines_of(launcher), logs / f"{meeting.job}.stop"
    started: list[psutil.Process] = []
    try:
        while launcher.poll() is None:
            if not started or not all(rank.is_running() for rank in started):
                started = psutil.Process(launcher.pid).children()
            if stop.pending:
                # Without ranks it may wait for other machines, which may never come.
                if not started and (folder / OUTCOME).is_file():
                    return 0
                if not started:
                    stop.obey("before its ranks had begun")
                if not stop_file.exists():
                    write_text(stop_file, stop.reason)
            meeting.look()
            time.sleep(_POLL_S)
        return launcher.returncode
    finally:
        _end(launcher, started)
        for thread in printing:
            thread.join(_END_S)
        stop_file.unlink(missing_ok=True)


def _print_lines_of(launcher: "subprocess.Popen[bytes]") -> list[threading.Thread]:
    """Print the lines that the launcher and the first rank write into their pipes as output of this process,
    so that they reach a flow run's log. Return the threads that do so."""

    def pass_on(pipe: IO[bytes], out: TextIO) -> None:
        for line in pipe:
            print(line.decode(errors="replace"), end="", file=out, flush=True)

    threads = []
    for pipe, out in ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr)):
        if pipe is not None:
            # With this thread's context, by which Prefect finds the flow run whose log gets the lines.
            run = contextvars.copy_context().run
            threads.append(threading.Thread(target=run, args=(pass_on, pipe, out), daemon=True))
            threads[-1].start()
    return threads


def _end(launcher: "subprocess.Popen[bytes]", ranks: list[psutil.Process]) -> None:
    """End the launcher and its ranks, if they still run. Ranks that have lost their launcher end by
    themselves, after a checkpoint."""
    launcher.terminate()
    try:
        launcher.wait(_END_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
    for rank in psutil.wait_procs(ranks, timeout=_END_S)[1]:
        with suppress(psutil.NoSuchProcess):
            rank.kill()


def _identity_of(pid: int) -> str:
    # With the start time, because the kernel reuses process ids.
    return f"{pid}:{psutil.Process(pid).create_time()}"


def meeting_file(ending: str) -> Path:
    """In a rank: return a file of its job. "stop": where the reason is written for which all ranks have to
    stop. "store": where the ranks of this start exchange addresses."""
    place, job = Path(os.environ[MEETING_PLACE]), os.environ["TORCHELASTIC_RUN_ID"]
    # The launchers choose the port for each start, the same on all machines. Nothing listens there.
    return place / f"{job}.stop" if ending == "stop" else place / f"{job}-{os.environ['MASTER_PORT']}.store"


def reason_outside() -> str:
    """In a rank: return why the process that started it asks it to end; "" if it does not."""
    file = meeting_file("stop")
    return file.read_text(encoding="utf-8") if file.exists() else ""


@contextmanager
def asked_from_outside(stop: StopRequest) -> Iterator[None]:
    """In a rank: during the block, pass on a stop request of the process that started it, and stop when that
    process has died.

    If it died before the ranks have connected, the rank exits at once: it has no work to save, would wait for
    ranks that may never come, and no process is left to end it.
    """
    # Imported here, because the process that starts ranks does not need it.
    import torch.distributed as dist

    starter, launcher = os.environ[_PARENT], os.getppid()

    def look() -> bool:
        if reason := reason_outside():
            stop.ask(reason)
        if _is_alive(starter) and os.getppid() == launcher:
            return False
        if not dist.is_initialized():
            os._exit(1)  # prints nothing, as nobody reads its pipe any more
        stop.ask("the end of the process that started the ranks")
        return True

    with watching(look, _POLL_S, "dphybrid-stop"):
        yield


def _is_alive(name: str) -> bool:
    pid = int(name.partition(":")[0])
    try:
        return _identity_of(pid) == name
    except psutil.NoSuchProcess:
        return False
