"""Starts the ranks of a run as processes of this machine, and restarts all of them when one dies.

Ranks find each other through files in a folder that only their user can enter. Several machines share that
folder and number their starts by its files: when one machine restarts its ranks, the others follow.
"""

import contextvars
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_END_S = 30.0
"""How long ranks may take to end after a signal before they are killed."""
_NOTICE_S = 5.0
"""How long ranks may take to notice that another one has died before they are killed."""

# Environment variables of a rank: who started it, where ranks meet, the file that asks it to stop.
_PARENT = "DPHYBRID_CLUSTER_PARENT"
STORE = "DPHYBRID_CLUSTER_STORE"
_STOP_FILE = "DPHYBRID_CLUSTER_STOP_FILE"
_LOOPBACK = "127.0.0.1"
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
    address: str = _LOOPBACK
    look: Callable[[], None] = lambda: None


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


def rank_environment(settings: Mapping[str, object], address: str = _LOOPBACK) -> dict[str, str]:
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
    }
    for interface, addresses in psutil.net_if_addrs().items():
        if address in {one.address for one in addresses}:
            # On one machine always the loopback, even if these variables name the interface of a network.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                known[name] = interface if address == _LOOPBACK else os.environ.get(name, interface)
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
    code = run_ranks(here, (PROGRAM, str(folder)), folder, environment, restarts, stop, meeting)
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
) -> int:
    """Run `python -m MODULE...` as `count` ranks on this machine until all have ended; return 0, or the exit
    code of a rank that failed after the last restart.

    The first rank prints to this process's output, the others into files in folder/ranks. environment: from
    `rank_environment`. stop: a request is passed to the ranks through a file in folder/ranks; they end with a
    checkpoint. meeting: all machines of the job must see the same folder. Raises UserError if other users
    could read folder/ranks.
    """
    # Ranks exchange addresses through files there, so no other user may write into it.
    logs = own_folder(folder / "ranks")
    for old in [*logs.glob("*.store"), *logs.glob("*.stop")]:
        # Only the first machine cleans up: another one could remove files that the first has just written.
        if meeting.node == 0 and not old.name.startswith(meeting.job):
            old.unlink(missing_ok=True)
    start = _Starts(count, module, logs, environment, meeting, stop)
    attempt, code = 0, 1
    # The number of a start is the same on all machines. A machine whose rank failed goes on to the next
    # number, and the others follow.
    while code and attempt <= restarts:
        code = start.run(attempt)
        later = max(attempt + 1, start.newest())
        if code and later <= restarts:
            print(
                f"A rank ended with exit code {code}: restarting all ranks from the newest checkpoint "
                f"(restart {later} of {restarts})",
                flush=True,
            )
        attempt = later
    start.stop_file.unlink(missing_ok=True)
    return code


@dataclass(frozen=True)
class _Starts:
    """Starts the ranks of this machine and ends them together. Fields as in `run_ranks`."""

    count: int
    module: Sequence[str]
    logs: Path
    environment: Mapping[str, str]
    meeting: Meeting
    stop: StopRequest

    @property
    def stop_file(self) -> Path:
        return self.logs / f"{self.meeting.job}.stop"

    def newest(self) -> int:
        """Return the highest number of a start on any machine."""
        stores = self.logs.glob(f"{self.meeting.job}-*.store")
        return max((int(store.stem.rpartition("-")[2]) for store in stores), default=0)

    def run(self, attempt: int) -> int:
        """Start the ranks and wait for their end; return 0, or the exit code of a failed rank. They are also
        ended when another machine makes a start with a higher number."""
        ranks = [self._start(local, attempt) for local in range(self.count)]
        printing = _print_lines_of(ranks[0])
        try:
            while any(rank.poll() is None for rank in ranks):
                # Healthy ranks notice the loss themselves and may finish writing; the others are killed.
                if code := next((rank.returncode for rank in ranks if rank.returncode), 0):
                    _end(ranks, None, _NOTICE_S)
                    return code
                # Another machine has restarted: the ranks here wait for processes that no longer exist.
                if self.meeting.nodes > 1 and self.newest() > attempt:
                    _end(ranks, signal.SIGKILL, _NOTICE_S)
                    return -signal.SIGKILL
                if self.stop.pending and not self.stop_file.exists():
                    write_text(self.stop_file, self.stop.reason)
                self.meeting.look()
                time.sleep(_POLL_S)
            return next((rank.returncode for rank in ranks if rank.returncode), 0)
        finally:
            _end(ranks, signal.SIGTERM, _END_S)
            for thread in printing:
                thread.join(_END_S)

    def _start(self, local: int, attempt: int) -> "subprocess.Popen[bytes]":
        rank = self.meeting.node * self.count + local
        values = {
            # The same names as torchrun's, so that torch finds its rank.
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self.count * self.meeting.nodes,
            "LOCAL_WORLD_SIZE": self.count,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            # A new file for each start: ranks would wait at the addresses of the last one (pytorch#135712).
            STORE: self.logs / f"{self.meeting.job}-{attempt}.store",
            _STOP_FILE: self.stop_file,
        }
        environment = {**self.environment, **{name: str(value) for name, value in values.items()}}
        log = self.logs / f"rank-{rank}.start-{attempt}.log"
        with log.open("wb") if local else open(os.devnull, "wb") as file:
            # In a terminal the first rank inherits it, to draw its progress bar. Otherwise its lines are
            # piped and printed here, because a flow run's log only gets what this process prints.
            piped = None if sys.stdout.isatty() else subprocess.PIPE
            # A new session: Ctrl-C reaches only this process, which asks all ranks to stop.
            return subprocess.Popen(
                [sys.executable, "-P", "-m", *self.module],
                env=environment,
                start_new_session=True,
                stdout=file if local else piped,
                stderr=subprocess.STDOUT if local else piped,
            )


def _print_lines_of(rank: "subprocess.Popen[bytes]") -> list[threading.Thread]:
    """Print the lines that a rank writes into its pipes as output of this process, so that they reach a flow
    run's log. Return the threads that do so."""

    def pass_on(pipe: IO[bytes], out: TextIO) -> None:
        for line in pipe:
            print(line.decode(errors="replace"), end="", file=out, flush=True)

    threads = []
    for pipe, out in ((rank.stdout, sys.stdout), (rank.stderr, sys.stderr)):
        if pipe is not None:
            # With this thread's context, by which Prefect finds the flow run whose log gets the lines.
            run = contextvars.copy_context().run
            threads.append(threading.Thread(target=run, args=(pass_on, pipe, out), daemon=True))
            threads[-1].start()
    return threads


def _end(ranks: Sequence["subprocess.Popen[bytes]"], number: int | None, wait_s: float) -> None:
    """End the ranks that still run: send the signal `number`, if any, and kill those that take longer than
    `wait_s`."""
    for rank in ranks:
        if number is not None and rank.poll() is None:
            rank.send_signal(number)
    deadline = time.monotonic() + wait_s
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _identity_of(pid: int) -> str:
    # With the start time, because the kernel reuses process ids.
    return f"{pid}:{psutil.Process(pid).create_time()}"


def reason_outside() -> str:
    """In a rank: return why the process that started it asks it to end; "" if it does not."""
    file = os.environ.get(_STOP_FILE)
    return Path(file).read_text(encoding="utf-8") if file and Path(file).exists() else ""


@contextmanager
def asked_from_outside(stop: StopRequest) -> Iterator[None]:
    """In a rank: during the block, pass on a stop request of the process that started it, and stop when that
    process has died.

    If it died before the ranks have connected, the rank exits at once: it has no work to save, would wait for
    ranks that may never come, and no process is left to end it.
    """
    parent = os.environ.get(_PARENT)

    def look() -> bool:
        if reason := reason_outside():
            stop.ask(reason)
        if not parent or _is_alive(parent):
            return False
        # Imported here, because the process that starts ranks does not need torch.
        from torch.distributed import is_initialized

        if not is_initialized():
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
