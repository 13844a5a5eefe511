"""Starts the ranks of a run as processes of this machine, and starts all of them anew after one has died.

Ranks meet through files in a folder that only their user can enter. Several machines share that folder, and
number their starts by its files: who starts again makes the others start again.
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
"""Time that ranks get to end after a signal, before they are killed."""
_NOTICE_S = 5.0
"""Time that ranks get to notice that another one has died, before they are killed."""

_PARENT = "DPHYBRID_CLUSTER_PARENT"
STORE = "DPHYBRID_CLUSTER_STORE"
_STOP_FILE = "DPHYBRID_CLUSTER_STOP_FILE"
_LOOPBACK = "127.0.0.1"
OUTCOME = "ranks.json"

PROGRAM = "dphybrid.run.joined"
"""The module that a rank runs, with the run's folder. Tests of the processes put another one here."""


class Outcome(Page):
    """`ranks.json`: how the ranks of a run ended, when they ended in good order. words: for people."""

    state: Literal["trained", "stopped", "refused"]
    words: str = ""


@dataclass(frozen=True)
class Meeting:
    """Which ranks of a job this machine starts: all, unless there are several machines.

    job: name of this start of the run, never used before. nodes: machines; node: number of this one. address:
    of this machine, as the others reach it. look: called several times a second while ranks run; an exception
    from it ends them.
    """

    job: str = field(default_factory=lambda: secrets.token_hex(8))
    nodes: int = 1
    node: int = 0
    address: str = _LOOPBACK
    look: Callable[[], None] = lambda: None


def address_towards(host: str, named: str = "") -> str:
    """Return this machine's address for other ranks: `named` (DPHYBRID_CLUSTER_ADDRESS), else the one from
    which it reaches a host.

    Raises UserError for a public address that nobody named, and when there is no way to the host.
    """
    if named:
        return named
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # connecting sends nothing
            probe.connect(there)
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"no way to {host} ({error}); set DPHYBRID_CLUSTER_ADDRESS to this machine's address"
        ) from error
    if ipaddress.ip_address(address.partition("%")[0]).is_global:
        raise UserError(
            f"ranks would listen at the public address {address}, and have no password; set "
            "DPHYBRID_CLUSTER_ADDRESS to an address in a trusted network, or to this one behind a firewall"
        )
    return address


def rank_environment(settings: Mapping[str, object], address: str = _LOOPBACK) -> dict[str, str]:
    """Return the variables that all ranks here share: this process's, and the settings.

    address: of this machine, as the other ranks reach it. Ranks listen at its interface, unless this
    process's variables name another.
    """
    values = {f"DPHYBRID_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
    known = {
        # as torchrun has it: ranks side by side share the cores
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])),
        _PARENT: _name_of(os.getpid()),
    }
    for interface, addresses in psutil.net_if_addrs().items():
        if address in {one.address for one in addresses}:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                known[name] = interface if address == _LOOPBACK else os.environ.get(name, interface)
            break
    return {**os.environ, **values, **known}


def train_in_ranks(
    folder: Path, ranks: int, settings: Settings, stop: StopRequest, meeting: Meeting | None
) -> Outcome:
    """Train the run of a folder by this machine's share of its ranks; return how they ended.

    meeting: with other machines; None: all ranks are here. Raises UserError when they died too often.
    """
    logs, meeting = folder / "ranks", meeting or Meeting()
    here = ranks // meeting.nodes
    print(f"Starting {here} ranks; what the others than the first print is in {logs}", flush=True)
    environment = rank_environment(settings.model_dump(mode="json"), meeting.address)
    restarts = settings.cluster_restarts
    code = run_ranks(here, (PROGRAM, str(folder)), folder, environment, restarts, stop, meeting)
    if not (folder / OUTCOME).is_file():
        raise UserError(
            f"the ranks of run {folder.name} ended with exit code {code}, after {restarts} restarts at most; "
            f"what they said is above and in {logs}; go on from the newest checkpoint with --resume"
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
    code of one that failed after the last restart.

    The first rank's lines go to this process's output, the others' into files in folder/ranks. stop: reaches
    the ranks through a file there; they end with a checkpoint. environment: of `rank_environment`. meeting:
    other machines see the same folder. Raises UserError when others could read folder/ranks.
    """
    logs = own_folder(folder / "ranks")  # ranks meet there
    for old in [*logs.glob("*.store"), *logs.glob("*.stop")]:
        # The first machine alone: another one would remove what it has just written.
        if meeting.node == 0 and not old.name.startswith(meeting.job):
            old.unlink(missing_ok=True)
    start = _Starts(count, module, logs, environment, meeting, stop)
    attempt, code = 0, 1
    # A start has the same number on all machines: who failed goes to the next one, and the others follow.
    while code and attempt <= restarts:
        code = start.run(attempt)
        later = max(attempt + 1, start.newest())
        if code and later <= restarts:
            print(
                f"A rank ended with exit code {code}: all ranks start again from the newest checkpoint "
                f"(restart {later} of {restarts})",
                flush=True,
            )
        attempt = later
    start.stop_file.unlink(missing_ok=True)
    return code


@dataclass(frozen=True)
class _Starts:
    """Starts the ranks of this machine together, and ends them together."""

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
        """Return the number of the newest start on any machine."""
        stores = self.logs.glob(f"{self.meeting.job}-*.store")
        return max((int(store.stem.rpartition("-")[2]) for store in stores), default=0)

    def run(self, attempt: int) -> int:
        """Start the ranks and wait for their end; return 0, or the exit code of one that failed. A start with
        a higher number on another machine ends them as well."""
        ranks = [self._start(local, attempt) for local in range(self.count)]
        printing = _print_lines_of(ranks[0])
        try:
            while any(rank.poll() is None for rank in ranks):
                # the others notice by themselves, and write what they lack; who does not is killed
                if code := next((rank.returncode for rank in ranks if rank.returncode), 0):
                    _end(ranks, None, _NOTICE_S)
                    return code
                # another machine has started again: these would wait for ranks that are gone
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
            # the names that torchrun gives them, so that a program of torch's finds its place
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self.count * self.meeting.nodes,
            "LOCAL_WORLD_SIZE": self.count,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            # a new file for each start: addresses of the last one would keep ranks waiting (pytorch#135712)
            STORE: self.logs / f"{self.meeting.job}-{attempt}.store",
            _STOP_FILE: self.stop_file,
        }
        environment = {**self.environment, **{name: str(value) for name, value in values.items()}}
        log = self.logs / f"rank-{rank}.start-{attempt}.log"
        with log.open("wb") if local else open(os.devnull, "wb") as file:
            # A terminal is handed on, so that the rank draws its bar there; a flow run's log takes lines.
            piped = None if sys.stdout.isatty() else subprocess.PIPE
            # A session of its own: a terminal's Ctrl-C reaches this process alone, which hands it on.
            return subprocess.Popen(
                [sys.executable, "-m", *self.module],
                env=environment,
                start_new_session=True,
                stdout=file if local else piped,
                stderr=subprocess.STDOUT if local else piped,
            )


def _print_lines_of(rank: "subprocess.Popen[bytes]") -> list[threading.Thread]:
    """Print what a rank writes into its pipes as this process's own output, which a flow run's log gets, too.
    Returns the threads that do it."""

    def pass_on(pipe: IO[bytes], out: TextIO) -> None:
        for line in pipe:
            print(line.decode(errors="replace"), end="", file=out, flush=True)

    threads = []
    for pipe, out in ((rank.stdout, sys.stdout), (rank.stderr, sys.stderr)):
        if pipe is not None:
            run = contextvars.copy_context().run
            threads.append(threading.Thread(target=run, args=(pass_on, pipe, out), daemon=True))
            threads[-1].start()
    return threads


def _end(ranks: Sequence["subprocess.Popen[bytes]"], number: int | None, wait_s: float) -> None:
    """End ranks that run: by a signal, if any, and by force when they take longer than `wait_s`."""
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


def _name_of(pid: int) -> str:
    # The kernel reuses numbers; the start time tells one process from a later one.
    return f"{pid}:{psutil.Process(pid).create_time()}"


def reason_outside() -> str:
    """In a rank: why the process that started the ranks asks them to end; "" while it does not."""
    file = os.environ.get(_STOP_FILE)
    return Path(file).read_text(encoding="utf-8") if file and Path(file).exists() else ""


@contextmanager
def asked_from_outside(stop: StopRequest) -> Iterator[None]:
    """In a rank: ask `stop` when the process that started the ranks says so by a file, or is gone.

    A rank of a starter that is gone before the ranks have met ends at once: it would wait for others that may
    never come, has nothing to keep, and nobody would end it.
    """
    parent = os.environ.get(_PARENT)

    def look() -> bool:
        if reason := reason_outside():
            stop.ask(reason)
        if not parent or _lives(parent):
            return False
        from torch.distributed import is_initialized  # here: who starts ranks needs no torch

        if not is_initialized():
            os._exit(1)  # without a word: the pipe that its lines go into has lost its reader
        stop.ask("the end of the process that started the ranks")
        return True

    with watching(look, _POLL_S, "dphybrid-stop"):
        yield


def _lives(name: str) -> bool:
    pid = int(name.partition(":")[0])
    try:
        return _name_of(pid) == name
    except psutil.NoSuchProcess:
        return False
