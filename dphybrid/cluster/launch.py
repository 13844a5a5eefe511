"""Ranks as processes of this machine: torchrun's agent starts them, and starts all anew after one died. The
agents of several machines meet where the first one says."""

import contextvars
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from dphybrid.util.pages import Page
from dphybrid.util.stop import StopRequest
from dphybrid.util.system import need_posix

POLL_S = 0.2
END_S = 45.0
"""How long the agent may take to end its ranks: it kills them after 30 s itself."""

PARENT = "DPHYBRID_CLUSTER_PARENT"
LOOPBACK = "127.0.0.1"
OUTCOME = "ranks.json"


class Outcome(Page):
    """`ranks.json`: how the ranks of a run ended, when they ended in good order. words: for people."""

    state: Literal["trained", "stopped", "refused"]
    words: str = ""


@dataclass(frozen=True)
class Meeting:
    """Where and how the agents of one job meet: by default, the only one of this machine with itself.

    job: torchrun's `--rdzv-id`. nodes: machines. endpoint: HOST:PORT on the first one. address: of this
    machine, as the others reach it. first: this one is the first. wait_s: how long agents wait for each
    other. look: called several times a second while the agent runs; what it raises ends the agent.
    """

    job: str
    nodes: int = 1
    endpoint: str = f"{LOOPBACK}:0"
    address: str = LOOPBACK
    first: bool = True
    wait_s: float = 600.0
    look: Callable[[], None] = lambda: None

    @property
    def flags(self) -> tuple[str, ...]:
        """What torchrun is told."""
        conf = f"is_host={str(self.first).lower()},join_timeout={self.wait_s:.0f}"
        return (
            *("--nnodes", str(self.nodes), "--rdzv-backend", "c10d", "--rdzv-id", self.job),
            *("--rdzv-endpoint", self.endpoint, "--local-addr", self.address, "--rdzv-conf", conf),
        )


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches a host. Raises OSError when there is no
    way."""
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting sends nothing
        probe.connect(there)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address, None where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in {one.address for one in addresses}:
            return name
    return None


def agent_environment(settings: Mapping[str, object], address: str = LOOPBACK) -> dict[str, str]:
    """Return the variables of an agent and its ranks: this process's, and settings that these do not hold.

    address: of this machine, as the other ranks reach it. Its interface is named to the backends, unless
    this process's variables name one.
    """
    values = {f"DPHYBRID_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
    known = {
        # Without it an agent's restart meets the addresses of the ranks before, and hangs (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])),
        PARENT: _name_of(os.getpid()),
    }
    if interface := interface_of(address):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            known[name] = interface if address == LOOPBACK else os.environ.get(name, interface)
    return {**os.environ, **values, **known}


def run_agent(
    ranks: int,
    module: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    restarts: int,
    stop: StopRequest,
    meeting: Meeting | None = None,
) -> int:
    """Run `python -m MODULE...` as so many ranks on this machine until all have ended; return the agent's
    exit code.

    What rank 0 prints, or the first one here, goes to this process's output; what others print, to files in
    folder/ranks. stop: is handed on through a file `.stop-JOB` of the folder, which the ranks look for; they
    end with a checkpoint then. environment: of `agent_environment`. meeting: with the agents of other
    machines, which see the same folder.
    """
    need_posix("cluster.ranks", "several devices of one process")
    meeting = meeting or Meeting(folder.name)
    logs, stop_file = folder / "ranks", _stop_file(folder, meeting.job)
    logs.mkdir(exist_ok=True)
    if meeting.first:
        stop_file.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *meeting.flags, "--nproc-per-node", str(ranks)),
        *("--max-restarts", str(restarts), "--log-dir", str(logs)),
        *(("--redirects", ",".join(f"{rank}:3" for rank in range(1, ranks))) if ranks > 1 else ()),
        *("-m", *module),
    ]
    piped = None if sys.stdout.isatty() else subprocess.PIPE
    # A session of its own: a terminal's Ctrl-C reaches this process alone, which hands it on.
    agent = subprocess.Popen(
        command, env=dict(environment), start_new_session=True, stdout=piped, stderr=piped
    )
    printing = _print_lines_of(agent)
    try:
        while (code := agent.poll()) is None:
            if stop.pending and not stop_file.exists():
                stop_file.write_text(stop.reason, encoding="utf-8")
            meeting.look()
            time.sleep(POLL_S)
        if code:
            _end_ranks_left(environment[PARENT])
        return code
    finally:
        if meeting.first:
            stop_file.unlink(missing_ok=True)
        if agent.poll() is None:
            _end(agent)
        for thread in printing:
            thread.join(END_S)


def _print_lines_of(agent: "subprocess.Popen[bytes]") -> list[threading.Thread]:
    """Print what an agent writes into its pipes as if this process's own code did: who catches what that
    prints, such as a flow run, gets these lines, too. Returns the threads that do it."""

    def pass_on(pipe: IO[bytes], error: bool) -> None:
        for line in pipe:
            print(line.decode(errors="replace"), end="", file=sys.stderr if error else sys.stdout, flush=True)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(pass_on, pipe, pipe is agent.stderr))
        for pipe in (agent.stdout, agent.stderr)
        if pipe is not None
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    return threads


def _end_ranks_left(parent: str) -> None:
    """Kill the ranks of an agent that this process, of that name, had started and that was killed."""
    for process in psutil.process_iter(["environ"]):
        named = process.info["environ"] or {}
        if named.get(PARENT) == parent and process.pid != os.getpid():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def _end(agent: "subprocess.Popen[bytes]") -> None:
    """End an agent and its ranks, which have sessions of their own: by signal, then by force."""
    family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    agent.send_signal(signal.SIGTERM)
    try:
        agent.wait(END_S)
    except subprocess.TimeoutExpired:
        for process in family:
            if process.is_running():
                process.kill()
        agent.wait()


def _stop_file(folder: Path, job: str) -> Path:
    return folder / f".stop-{job}"


def _name_of(pid: int) -> str:
    return f"{pid}:{psutil.Process(pid).create_time()}"


@contextmanager
def asked_from_outside(stop: StopRequest, folder: Path | None) -> Iterator[None]:
    """In a rank: ask `stop` when the run's folder says so, or when the process that started the ranks is
    gone."""
    over, parent = threading.Event(), os.environ.get(PARENT)
    file = _stop_file(folder, os.environ["TORCHELASTIC_RUN_ID"]) if folder is not None else None

    def look() -> None:
        while not over.wait(POLL_S):
            if file is not None and file.exists():
                stop.ask(file.read_text(encoding="utf-8") or f"its folder's {file.name}")
                return
            if parent and not _lives(parent):
                stop.ask("the end of the process that started the ranks")
                return

    thread = threading.Thread(target=look, name="dphybrid-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _lives(name: str) -> bool:
    pid = int(name.partition(":")[0])
    try:
        return _name_of(pid) == name
    except psutil.NoSuchProcess:
        return False
