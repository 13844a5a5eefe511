"""Starts the ranks of a run by torchrun, which restarts all of them when one dies.

Ranks exchange their addresses through a file in the run's folder, so that nothing but their own connections
listens on the network. If torchrun's variables (`PET_NNODES` and others) name several machines, the ranks
here are this machine's share, and torchrun is started by hand on the others (docs/cluster.md).
"""

import contextvars
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal, TextIO

import psutil

from dphybrid.config.settings import Settings
from dphybrid.util.alive import lives, process_name
from dphybrid.util.errors import UserError
from dphybrid.util.files import write_text
from dphybrid.util.pages import Page
from dphybrid.util.stop import StopRequest, watching

_POLL_S = 0.2
_RESTARTS = 3
"""How often the ranks of a run are restarted from its newest checkpoint after one has died."""
_END_S = 40.0
"""How long ranks that have lost torchrun may take to write a checkpoint and end."""
_SEVERAL = "PET_NNODES"
"""torchrun's variable that names the number of machines."""
_STARTER = "DPHYBRID_CLUSTER_STARTER"
"""Environment variable of a rank: the process that started torchrun. Not set if you started it."""
OUTCOME = "ranks.json"


class Outcome(Page):
    """`ranks.json`: how the ranks of a run ended. Missing if they crashed. words: the message to show."""

    state: Literal["trained", "stopped", "refused"]
    words: str = ""


def local_ranks(ranks: int) -> int:
    """Return how many of a run's ranks this machine gets: all, unless torchrun's variables say otherwise."""
    return int(os.environ.get("PET_NPROC_PER_NODE", ranks)) if _SEVERAL in os.environ else ranks


def rank_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the environment variables that all ranks of this machine share: those of this process, and the
    settings. On one machine ranks listen at 127.0.0.1."""
    values = {f"DPHYBRID_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
    known = {
        # One thread by default, like torchrun: the ranks share the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])),
        "PYTHONSAFEPATH": "1",
        _STARTER: process_name(),
        # Otherwise torchrun listens on all interfaces, and restarted ranks hang at addresses of the last
        # start (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if _SEVERAL not in os.environ:
        known |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback())
    return {**os.environ, **values, **known}


def _loopback() -> str:
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, all_ in interfaces if "127.0.0.1" in {one.address for one in all_})


def train_in_ranks(folder: Path, ranks: int, settings: Settings, stop: StopRequest) -> Outcome:
    """Train the run of a folder with this machine's ranks; return how they ended. Raises UserError if ranks
    died too often."""
    here, logs = local_ranks(ranks), folder / "ranks"
    print(f"Starting {here} ranks; only the first prints here, the others write to {logs}", flush=True)
    environment = rank_environment(settings.model_dump(mode="json"))
    code = run_ranks(here, ("dphybrid.run.joined", str(folder)), folder, environment, _RESTARTS, stop)
    if not (folder / OUTCOME).is_file():
        raise UserError(
            f"the ranks of run {folder.name} ended with exit code {code} after at most {_RESTARTS} restarts; "
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
    look: Callable[[], None] = lambda: None,
) -> int:
    """Run `python -m MODULE...` as `count` ranks on this machine until all have ended; return 0, or 1 if one
    failed after the last restart or the machines did not meet.

    The first rank prints to this process's output, the others into files in folder/ranks, which only this
    user may enter.

    Args:
        environment: From `rank_environment`.
        stop: A request is passed to the ranks through a file in folder/ranks; they end with a checkpoint.
        look: Called several times a second while ranks run; an exception from it ends them.
    """
    # Ranks exchange addresses through files there, so no other user may write into it.
    logs = folder / "ranks"
    logs.mkdir(exist_ok=True)
    if logs.is_symlink() or logs.stat().st_uid != os.getuid():
        raise UserError(f"{logs}: is a link or another user's; remove it: only this user may enter it")
    logs.chmod(0o700)
    for old in [*logs.glob("*.store"), _stop_file(folder)]:
        old.unlink(missing_ok=True)
    meeting = ["--nnodes=1", f"--nproc-per-node={count}", "--local-addr=127.0.0.1", "--rdzv-backend=c10d"]
    meeting += [f"--rdzv-endpoint={logs / 'torchrun.store'}", f"--rdzv-id={secrets.token_hex(8)}"]
    # Heartbeats are rare, as each one makes the file longer.
    meeting += ["--rdzv-conf=store_type=file,keep_alive_interval=60"]
    others = [f"--redirects={','.join(f'{rank}:3' for rank in range(1, count))}"] if count > 1 else []
    # In a terminal the first rank inherits it, to draw its progress bar. Otherwise its lines are piped and
    # printed here, because a flow run's log only gets what this process prints.
    piped = None if sys.stdout.isatty() else subprocess.PIPE
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "torch.distributed.run"),
            *([] if _SEVERAL in os.environ else meeting),
            *(f"--max-restarts={restarts}", f"--monitor-interval={_POLL_S}", f"--log-dir={logs}", *others),
            *("-m", *module),
        ],
        env=environment,
        # A new session: Ctrl-C reaches only this process, which asks all ranks to stop.
        start_new_session=True,
        stdout=piped,
        stderr=piped,
    )
    printing = _print_lines_of(launcher)
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
                if not _stop_file(folder).exists():
                    write_text(_stop_file(folder), stop.reason)
            look()
            time.sleep(_POLL_S)
        return launcher.returncode
    finally:
        _end(launcher, started)
        for thread in printing:
            thread.join(_END_S)
        _stop_file(folder).unlink(missing_ok=True)


def _print_lines_of(launcher: "subprocess.Popen[bytes]") -> list[threading.Thread]:
    """Print the lines that torchrun and the first rank write into their pipes as output of this process, so
    that they reach a flow run's log. Return the threads that do so."""

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
    """End torchrun, if it still runs: ranks that have lost it end by themselves, after a checkpoint."""
    launcher.kill()
    launcher.wait()
    for rank in psutil.wait_procs(ranks, timeout=_END_S)[1]:
        with suppress(psutil.NoSuchProcess):
            rank.kill()


def _stop_file(folder: Path) -> Path:
    return folder / "ranks" / "stop"


def address_file(folder: Path) -> Path:
    """In a rank: return the file through which the ranks of this start exchange their addresses."""
    # torchrun chooses the port for each start, the same on all machines. Nothing listens there.
    return folder / "ranks" / f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['MASTER_PORT']}.store"


def reason_outside(folder: Path) -> str:
    """In a rank: return why the process that started it asks it to end; "" if it does not."""
    file = _stop_file(folder)
    return file.read_text(encoding="utf-8") if file.exists() else ""


@contextmanager
def asked_from_outside(stop: StopRequest, folder: Path) -> Iterator[None]:
    """In a rank: during the block, pass on a stop request of the process that started it, and stop when that
    process has died.

    If it died before the ranks have connected, the rank exits at once: it has no work to save, would wait for
    ranks that may never come, and no process is left to end it.
    """
    # Imported here, because the process that starts ranks does not need it.
    import torch.distributed as dist

    starter, launcher = os.environ.get(_STARTER), os.getppid()

    def look() -> bool:
        if reason := reason_outside(folder):
            stop.ask(reason)
        if (starter is None or lives(starter)) and os.getppid() == launcher:
            return False
        if not dist.is_initialized():
            os._exit(1)  # prints nothing, as nobody reads its pipe any more
        stop.ask("the end of the process that started the ranks")
        return True

    with watching(look, _POLL_S, "dphybrid-stop"):
        yield
