"""Whether a run, or a process, is alive: the one place that decides it.

A run is alive if the lock of its folder is held, which the kernel releases however its process ends. A
process is known by its number and its start, as the kernel gives numbers again. No clock is asked.
"""

import os
import platform
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dphybrid.util.errors import UserError
from dphybrid.util.locks import FileLock, is_held

LOCK = ".lock"
"""The file in a run's folder that its process holds locked, from the making of the folder to the report."""
RUNNING = "run {} is running in another process; wait for its end, or stop it first"
NAME = re.compile(r"(\d+)-(\d+)-(\d+)-([0-9a-f]{8})-([0-9a-f]{8})")
"""The form of a process's name."""


def process_name(pid: int | None = None) -> str:
    """Return a name that no other process has, on any machine: `PID-START-NAMESPACE-BOOT-HOST`, which may be
    part of a file's name. pid: None for this process. Raises ProcessLookupError if it does not exist.

    START is in ticks since the boot, so setting the clock does not change it.
    """
    pid = pid or os.getpid()
    try:
        started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    fields = started.rpartition(")")[2].split()  # a program's name may hold spaces
    if fields[0] in "ZX":  # it has ended, and its parent has not asked for its exit code
        raise ProcessLookupError(pid)
    return f"{pid}-{fields[19]}-{_place()}"


def _place() -> str:
    """Return the process ids' namespace, this boot and the machine: where a process id means something."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{namespace}-{boot}-{zlib.crc32(platform.node().encode()):08x}"


def lives(name: str) -> bool | None:
    """Return whether a process that `process_name` named exists. None: it is of another machine or container,
    which alone can say, or nobody's name."""
    match, (namespace, boot, host) = NAME.fullmatch(name), _place().split("-")
    if match is None or match[5] != host:
        return None
    if match[4] != boot:
        return False
    if match[3] != namespace:
        return None
    try:
        return process_name(int(match[1])) == name
    except ProcessLookupError:
        return False


def alive(folder: Path) -> bool:
    """Return whether a run is alive: the lock of its folder is held."""
    return is_held(folder / LOCK)


@contextmanager
def holding(folder: Path, otherwise: str = RUNNING) -> Iterator[None]:
    """Hold the lock of the folder of a run or sweep during the block. Raises UserError when another process
    holds it, or has removed the folder. otherwise: the message while it is held."""
    lock = FileLock(folder / LOCK)
    try:
        acquired = lock.acquire()
    except FileNotFoundError as error:
        raise UserError(f"{folder}: was removed meanwhile") from error
    if not acquired:
        raise UserError(otherwise.format(folder.name))
    try:
        yield
    finally:
        lock.release()
