"""Ranks as processes of this machine: torchrun's agent starts them, and starts all anew after one died."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from dphybrid.util.stop import StopRequest

POLL_S = 0.2
END_S = 45.0
"""How long the agent may take to end its ranks: it kills them after 30 s itself."""

PARENT = "DPHYBRID_CLUSTER_PARENT"
STOP_FILE = ".stop"


def agent_environment(settings: Mapping[str, object], local: bool = True) -> dict[str, str]:
    """Return the variables of an agent and its ranks: this process's, and settings that these do not hold.

    local: all ranks are on this machine, whose name then need not be one that anybody can reach.
    """
    values = {f"DPHYBRID_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
    known = {
        # Without it an agent's restart meets the addresses of the ranks before, and hangs (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])),
    }
    if local:
        known |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", PARENT: _name_of(os.getpid())}
    return {**os.environ, **values, **known}


def run_agent(
    ranks: int,
    module: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    restarts: int,
    stop: StopRequest,
) -> int:
    """Run `python -m MODULE...` as so many ranks on this machine until all have ended; return the agent's
    exit code.

    What ranks print goes to this process's output (rank 0) and to files in folder/ranks. stop: is handed on
    through the file `.stop` of the folder, which the ranks look for; they end with a checkpoint then.
    """
    logs, stop_file = folder / "ranks", folder / STOP_FILE
    logs.mkdir(exist_ok=True)
    stop_file.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--rdzv-id", folder.name, "--max-restarts", str(restarts), "--log-dir", str(logs)),
        *(("--redirects", ",".join(f"{rank}:3" for rank in range(1, ranks))) if ranks > 1 else ()),
        *("-m", *module),
    ]
    # A session of its own: a terminal's Ctrl-C reaches this process alone, which hands it on.
    agent = subprocess.Popen(command, env=dict(environment), start_new_session=True)
    try:
        while (code := agent.poll()) is None:
            if stop.pending and not stop_file.exists():
                stop_file.write_text(stop.reason, encoding="utf-8")
            time.sleep(POLL_S)
        return code
    finally:
        stop_file.unlink(missing_ok=True)
        if agent.poll() is None:
            _end(agent)


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


def _name_of(pid: int) -> str:
    return f"{pid}:{psutil.Process(pid).create_time()}"


@contextmanager
def asked_from_outside(stop: StopRequest, folder: Path | None) -> Iterator[None]:
    """In a rank: ask `stop` when the run's folder says so, or when the process that started the ranks is
    gone."""
    over, parent = threading.Event(), os.environ.get(PARENT)

    def look() -> None:
        while not over.wait(POLL_S):
            if folder is not None and (folder / STOP_FILE).exists():
                stop.ask((folder / STOP_FILE).read_text(encoding="utf-8") or "its folder's .stop")
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
