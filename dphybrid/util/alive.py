"""Whether a run, or a process of this machine, is alive: the one place that decides it.

A run is alive if the lock of its folder is held, which the kernel releases however its process ends. A
process is known by its number and its start, as the kernel gives numbers again. No clock is asked.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dphybrid.util.errors import UserError
from dphybrid.util.locks import is_held, take

LOCK = ".lock"
"""The file in a run's folder that its process holds locked, from the making of the folder to the report."""
RUNNING = "run {} is running in another process; wait for its end, or stop it first"


def process_name(pid: int | None = None) -> str:
    """Return a name that no other process of this machine has: `PID-START`, the start in ticks since the
    boot. pid: None for this process. Raises ProcessLookupError if it does not exist."""
    pid = pid or os.getpid()
    try:
        started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    fields = started.rpartition(")")[2].split()  # a program's name may hold spaces
    if fields[0] in "ZX":  # it has ended, and its parent has not asked for its exit code
        raise ProcessLookupError(pid)
    return f"{pid}-{fields[19]}"


def lives(name: str) -> bool:
    """Return whether a process that `process_name` named on this machine exists."""
    try:
        return process_name(int(name.partition("-")[0])) == name
    except ProcessLookupError:
        return False


def alive(folder: Path) -> bool:
    """Return whether a run is alive: the lock of its folder is held."""
    return is_held(folder / LOCK)


@contextmanager
def holding(folder: Path, otherwise: str = RUNNING) -> Iterator[None]:
    """Hold the lock of the folder of a run or sweep during the block. Raises UserError when another process
    holds it, or has removed the folder. otherwise: the message while it is held."""
    try:
        handle = take(folder / LOCK)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: was removed meanwhile") from error
    if handle is None:
        raise UserError(otherwise.format(folder.name))
    try:
        yield
    finally:
        os.close(handle)
