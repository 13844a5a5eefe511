"""Leases: one lock file a GPU, held by `flock` in the process that computes, so that the kernel gives the GPU back however it ends.

The files stay where they are; whether one is locked is what counts. Their text says who holds them, for people.
"""

import fcntl
import json
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dphybrid.gpus.inventory import Gpu, clock_time
from dphybrid.util.errors import UserError

FALLBACK = Path("/tmp/dphybrid-leases")
"""For machines whose /var/lock only root may write to; the same for every user."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease."""

    pid: int
    user: str
    run: str
    since: datetime

    def text(self) -> str:
        return f"leased to {self.user}'s run {self.run} since {clock_time(self.since)} (pid {self.pid})"


class Lease:
    """The right to use some GPUs, until `release`, the end of the `with` block, or the end of this process."""

    def __init__(self, gpus: Sequence[Gpu], handles: Sequence[int], folder: Path) -> None:
        self.gpus = tuple(gpus)
        self.folder = folder
        self.since = time.time()
        self._handles = list(handles)
        _open_leases.add(self)

    def release(self) -> None:
        """Give the GPUs back."""
        for handle in self._handles:
            os.ftruncate(handle, 0)
        self._close()

    def _close(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


_open_leases: "weakref.WeakSet[Lease]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for lease in list(_open_leases):
        lease._close()


# A forked child shares the lock, and would keep the GPU taken when its parent is killed.
os.register_at_fork(after_in_child=_forget_in_child)


def lease_folder(wanted: Path) -> Path:
    """Return the folder of the locks, made for all users of this machine. Raises UserError when it cannot be written."""
    for folder in (wanted, FALLBACK):
        try:
            folder.mkdir(mode=0o1777, parents=True)
        except FileExistsError:
            pass
        except OSError:
            continue
        else:
            folder.chmod(0o1777)  # the umask took bits away
        if os.access(folder, os.W_OK):
            return folder
    raise UserError(f"DPHYBRID_LEASE_DIR={str(wanted)!r}: cannot be written; run `install -d -m 1777 {wanted}` as root")


def try_lease(folder: Path, gpus: Sequence[Gpu], run: str) -> Lease | None:
    """Lock all of `gpus`, or none: in the order of their UUIDs, without waiting. None when somebody holds one of them."""
    handles: list[int] = []
    try:
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):
            handles.append(_open_shared(_lock_file(folder, gpu.uuid)))
            _lock_now(handles[-1])
    except BlockingIOError:
        for handle in handles:
            os.close(handle)
        return None
    page = {"pid": os.getpid(), "user": user_name(), "run": run, "since": datetime.now().astimezone().isoformat()}
    for handle in handles:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(page).encode(), 0)
    return Lease(gpus, handles, folder)


def find_holder(folder: Path, uuid: str) -> Holder | None:
    """Return who holds the lease of a GPU, or None."""
    page = locked_page(_lock_file(folder, uuid))
    if page is None:
        return None
    if not page:  # locked this instant, its page not yet written
        return Holder(0, "somebody", "that is starting", datetime.now().astimezone())
    return Holder(page["pid"], page["user"], page["run"], datetime.fromisoformat(page["since"]))


def ask_for(folder: Path, gpu: Gpu) -> str:
    """Ask the run that holds a GPU to give it back; return what was done, for people."""
    holder = find_holder(folder, gpu.uuid)
    if holder is None:
        return f"{gpu.label} is leased to no run; nothing to ask"
    handle = _open_shared(_ask_file(folder, gpu.uuid))
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, user_name().encode(), 0)
        os.utime(handle)
    finally:
        os.close(handle)
    return f"{gpu.label} is {holder.text()}; asked to give way (it will unless its DPHYBRID_YIELD_TO_OTHERS is never)"


def asked_by(lease: Lease) -> str | None:
    """Return who has asked for a GPU of this lease since it began, or None."""
    for gpu in lease.gpus:
        file = _ask_file(lease.folder, gpu.uuid)
        try:
            if file.stat().st_mtime >= lease.since:
                return f"{file.read_text(encoding='utf-8') or 'somebody'} asked for {gpu.label}"
        except OSError:
            continue
    return None


def locked_page(file: Path) -> dict[str, Any] | None:
    """Return the page of a file that a living process holds locked ({} while it is being written), or None."""
    try:
        handle = os.open(file, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            page: dict[str, Any] = json.loads(os.pread(handle, 65536, 0) or b"{}")
        except ValueError:
            return {}
        return page
    else:
        return None
    finally:
        os.close(handle)


def user_name() -> str:
    """Return the name of this process's user."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def _lock_file(folder: Path, uuid: str) -> Path:
    return folder / f"gpu-{uuid.replace('/', '_')}.lock"


def _ask_file(folder: Path, uuid: str) -> Path:
    return _lock_file(folder, uuid).with_suffix(".asked")


def _open_shared(file: Path) -> int:
    # Not O_CREAT alone: in a sticky folder the kernel refuses it for a file of another user (fs.protected_regular).
    while True:
        try:
            return os.open(file, os.O_RDWR)
        except FileNotFoundError:
            pass
        except PermissionError as error:
            raise UserError(f"{file}: belongs to another user and cannot be opened; remove it, or `chmod 666` it") from error
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        os.fchmod(handle, 0o666)
        return handle


def _lock_now(handle: int) -> None:
    for attempt in range(3):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # perhaps somebody is only looking, which takes microseconds
            if attempt == 2:
                raise
            time.sleep(0.005)
        else:
            return
