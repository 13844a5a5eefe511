"""A process that lacks what Windows has not, as far as Linux can show it: modules, calls, signals, /proc,
and the right to rename or remove what is open.

`python -m tests.as_windows FOLDER` imports every module of dphybrid so, trains and predicts in the folder,
and prints what came out, as JSON. Libraries are imported first: they know Windows by themselves.
"""

import builtins
import importlib
import json
import mmap
import os
import pkgutil
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

LIBRARIES = (
    *(
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "numba",
        "filelock",
        "psutil",
        "pynvml",
        "safetensors.torch",
    ),
    *("sklearn.metrics", "matplotlib.figure", "plotly.graph_objects", "jinja2", "rich.live", "asyncio"),
    *("mlflow.tracking", "mlflow.pyfunc", "mlflow.data", "prefect", "prefect.workers.process"),
    *("prefect.server.api.server", "multiprocessing.forkserver", "concurrent.futures.process", "readline"),
)
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")
CALLS = {
    os: "getuid geteuid getgid fork forkpty register_at_fork killpg getpgid getpgrp setsid sched_getaffinity "
    "sched_setaffinity getloadavg statvfs fchmod fchown chown pread pwrite mkfifo fdatasync uname "
    "posix_fallocate posix_fadvise O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY wait nice getpriority",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD pthread_sigmask pthread_kill alarm setitimer",
    mmap: "MADV_HUGEPAGE MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED",
}


def take_away(folder: Path) -> None:
    """From here on this process has none of it. What is open below `folder` stays where it is."""
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in CALLS.items():
        for name in names.split():
            delattr(module, name)
    os.sysconf = _unknown  # psutil asks it, and goes on
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    os.environ["USERNAME"] = "ann"
    _close_proc()
    _keep_open_files(str(folder) + os.sep)


def _unknown(name: str) -> int:
    raise ValueError(f"{name}: is not known")


def _close_proc() -> None:
    for name in ("stat", "lstat", "read_text", "read_bytes", "exists", "iterdir"):
        real = getattr(Path, name)

        def closed(path: Path, *args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            if str(path).startswith(("/proc", "/sys")):
                raise FileNotFoundError(2, "is not there", str(path))
            return real(path, *args, **kwargs)

        setattr(Path, name, closed)


def _keep_open_files(root: str) -> None:
    """Renaming, replacing and removing fail as on Windows: for what this process has open or mapped, and for
    a new name that is taken. Folders cannot be opened, nor can a link be made."""
    readlink, listdir, real_open = os.readlink, os.listdir, builtins.open

    def in_use(path: str) -> bool:
        handles = []
        for number in listdir("/proc/self/fd"):
            try:
                handles.append(readlink(f"/proc/self/fd/{number}"))
            except OSError:
                continue
        with real_open("/proc/self/maps", encoding="utf-8") as maps:
            mapped = [line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if root in line]
        return any(name == path or name.startswith(path + os.sep) for name in [*handles, *mapped])

    def guarded(real: Callable[..., Any], *, overwrites: bool = True) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            paths = [os.path.abspath(os.fspath(arg)) for arg in args if isinstance(arg, str | os.PathLike)]
            for path in paths:
                if path.startswith(root) and in_use(path):
                    raise PermissionError(13, "is in use", path)
            if not overwrites and os.path.lexists(paths[1]):
                raise FileExistsError(17, "is there", paths[1])
            return real(*args, **kwargs)

        return call

    def opened(path: Any, *args: Any, real: Callable[..., int] = os.open, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "is a folder", str(path))
        return real(path, *args, **kwargs)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise OSError(22, "only administrators make links")

    os.rename = guarded(os.rename, overwrites=False)  # type: ignore[assignment]
    for name in ("replace", "unlink", "remove", "rmdir"):
        setattr(os, name, guarded(getattr(os, name)))
    os.open = opened
    os.symlink = forbidden  # type: ignore[assignment]


def keeps_open_files(folder: Path) -> bool:
    """Tell whether an open file keeps its name, as it should."""
    with (folder / "open").open("w", encoding="utf-8"):
        try:
            (folder / "open").rename(folder / "renamed")
        except PermissionError:
            return True
    return False


def import_everything() -> int:
    """Import every module of dphybrid; return how many there are."""
    import dphybrid

    names = [found.name for found in pkgutil.walk_packages(dphybrid.__path__, "dphybrid.")]
    for name in names:
        if not name.endswith(".__main__"):
            importlib.import_module(name)
    return len(names)


def rows(seed: int) -> pl.DataFrame:
    """Return made-up visits, the same for the same seed."""
    numbers = [(seed * 7 + row * 31) % 97 for row in range(400)]
    return pl.DataFrame(
        {
            "user": [f"u{number % 23}" for number in numbers],
            "hour": [number % 24 for number in numbers],
            "clicked": ["yes" if number % 5 < 2 else "no" for number in numbers],
        }
    )


def train_and_predict() -> dict[str, Any]:
    """Train a few steps, save, load and predict; return the figures."""
    import dphybrid

    run = dphybrid.train(
        rows(1), label="clicked", devices="cpu*2", epochs=2, batch_size=64, tracking="none", quiet=True
    )
    return {"metrics": run.metrics, "predicted": run.predict(rows(2)).tolist()}


def refusals(folder: Path) -> list[str]:
    """Return what is said of that which Windows cannot do."""
    from dphybrid.cluster.launch import run_agent
    from dphybrid.embedding import HostEmbedding
    from dphybrid.gpus import lease_folder
    from dphybrid.util.errors import UserError
    from dphybrid.util.stop import StopRequest

    said = []
    for tried in (
        lambda: lease_folder(folder),
        lambda: HostEmbedding(10, 2, storage="mmap", path=folder),
        lambda: run_agent(2, ["x"], folder, {}, 0, StopRequest()),
    ):
        try:
            tried()
        except UserError as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    here = Path(sys.argv[1])
    warnings.filterwarnings("error", category=EncodingWarning, module="dphybrid")
    for library in LIBRARIES:
        importlib.import_module(library)
    take_away(here)
    found = {"kept": keeps_open_files(here), "modules": import_everything(), "refused": refusals(here)}
    print(json.dumps(found | train_and_predict()))
