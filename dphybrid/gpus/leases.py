"""GPU leases: one lock file for each GPU, locked by the training process. The kernel releases the lock
however that process ends.

The files stay; only the lock counts. Their text says who holds the lease, for people to read. All users of
the machine write into the folder, so nothing in it is trusted: links and special files are refused, opening
never blocks, and the text is checked.
"""

import json
import os
import pwd
import stat
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from dphybrid.gpus.inventory import Gpu, clock_time
from dphybrid.util.errors import UserError
from dphybrid.util.locks import is_locked, lock, stands_at

_FALLBACK = Path("/tmp/dphybrid-leases")  # noqa: S108 - its owner, mode and files are looked at before use
"""Used where only root may write to /var/lock. All users must share one folder, so it cannot be in a home."""
_MAX_BYTES = 65536


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds characters that cannot be printed")
    return text


_ShownText = Annotated[str, Field(max_length=300), AfterValidator(_printable)]
"""Text from another user's file that is printed on a terminal: no control characters, limited length."""


class Holder(BaseModel):
    """Who holds a lease. odd: why the lock file cannot be used; "" when it can."""

    model_config = ConfigDict(frozen=True)

    pid: int = Field(default=0, ge=0)
    user: _ShownText = "somebody"
    run: _ShownText = "that is starting"
    since: AwareDatetime = Field(default_factory=lambda: datetime.now().astimezone())
    odd: str = Field(default="", exclude=True)

    def text(self) -> str:
        if self.odd:
            return f"cannot be leased: {self.odd}; remove it"
        return f"leased to {self.user}'s run {self.run} since {clock_time(self.since)} (pid {self.pid})"


class Lease:
    """The right to use some GPUs until `release`, the end of the `with` block, or the end of this process."""

    def __init__(self, gpus: Sequence[Gpu], handles: Sequence[int], folder: Path, mark: str) -> None:
        self.gpus = tuple(gpus)
        self.folder = folder
        self.mark = mark
        self._handles = list(handles)
        _open_leases.add(self)

    def release(self) -> None:
        """Give the GPUs back."""
        for handle in self._handles:
            os.ftruncate(handle, 0)
        # Do not remove the file: a waiting process may have it open and lock it, while a later one would
        # create and lock a new file of the same name.
        self._close()

    def lost(self) -> str | None:
        """Return which GPU has lost its lock file, so that others can lease it too, or None."""
        for gpu, handle in zip(sorted(self.gpus, key=lambda gpu: gpu.uuid), self._handles, strict=True):
            if not stands_at(_lock_file(self.folder, gpu.uuid), handle):
                return f"{gpu.label}: its lock file was removed, so another run may lease it"
        return None

    def _close(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_open_leases: "weakref.WeakSet[Lease]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for lease in list(_open_leases):
        lease._close()


# A forked child shares the lock: it would keep the GPU leased after its parent is killed.
os.register_at_fork(after_in_child=_forget_in_child)


def lease_folder(wanted: Path) -> Path:
    """Return the folder of the lock files; create it, writable for all users, if needed.

    Raises UserError when it cannot be written to, or when any user could remove the others' locks.
    """
    for folder in (wanted, _FALLBACK):
        try:
            folder.mkdir(mode=0o1777, parents=True)
        except FileExistsError:
            pass
        except OSError:
            continue
        else:
            folder.chmod(0o1777)  # the umask removed bits from mkdir's mode
        if os.access(folder, os.W_OK):
            fault = shared_folder_fault(folder)
            # Another owner is no fault here: the first user who trains creates the folder for all users.
            if fault and "belongs to" not in fault:
                raise UserError(
                    f"DPHYBRID_LEASE_DIR={str(wanted)!r}: {fault}; run `install -d -m 1777 -o root "
                    f"{folder}` as root"
                )
            return folder
    command = f"install -d -m 1777 {wanted}"
    raise UserError(f"DPHYBRID_LEASE_DIR={str(wanted)!r}: cannot be written; run `{command}` as root")


def shared_folder_fault(folder: Path) -> str | None:
    """Return why a folder is not safe to share, or None. In an unsafe one, some users can remove the files of
    others."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        return f"{folder} is not a folder"
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        return f"{folder} is not sticky, so any user can remove other users' files"
    if facts.st_uid not in (0, os.getuid()):
        return f"{folder} belongs to user {facts.st_uid}, who can remove other users' files"
    return None


def try_lease(folder: Path, gpus: Sequence[Gpu], run: str) -> Lease | None:
    """Lock all of `gpus` without waiting, or none of them. Returns None when another run holds one."""
    handles: list[int] = []
    try:
        # All runs lock in the same order, so two that want the same GPUs never each get a part of them.
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):
            file = _lock_file(folder, gpu.uuid)
            handles.append(_open_shared(file))
            _lock_now(handles[-1])
            if not stands_at(file, handles[-1]):
                raise BlockingIOError
    except OSError:  # held by another run, or not a usable lock file: `find_holder` says which
        for handle in handles:
            os.close(handle)
        return None
    pid, since = os.getpid(), datetime.now().astimezone()
    page = {"pid": pid, "user": _user_name(), "run": run, "since": since.isoformat()}
    for handle in handles:
        _write_page(handle, json.dumps(page))
    return Lease(gpus, handles, folder, _mark(pid, since))


def find_holder(folder: Path, uuid: str) -> Holder | None:
    """Return who holds the lease of a GPU, or None."""
    try:
        page = locked_page(_lock_file(folder, uuid))
    except OSError as error:
        return Holder(odd=str(error))
    if page is None:
        return None
    try:
        return Holder.model_validate_json(page)
    except ValidationError:  # just locked and its text not yet written, or not written by dphybrid
        return Holder()


def ask_for(folder: Path, gpu: Gpu) -> str:
    """Ask the run that holds a GPU to give it back; return a message that says what was done."""
    holder = find_holder(folder, gpu.uuid)
    if holder is None:
        return f"{gpu.label} is not leased, so there is no run to ask"
    try:
        handle = _open_shared(_ask_file(folder, gpu.uuid))
    except OSError as error:
        raise UserError(f"{error}; remove it") from error
    try:
        _write_page(handle, f"{_mark(holder.pid, holder.since)} {_user_name()}")
    finally:
        os.close(handle)
    asked = "asked to give way (it will unless its DPHYBRID_YIELD_TO_OTHERS is never)"
    return f"{gpu.label} is {holder.text()}; {asked}"


def asked_by(lease: Lease) -> str | None:
    """Return who has asked for a GPU of this lease, or None."""
    for gpu in lease.gpus:
        # suppress: nobody has asked, or the file is not a request
        with suppress(OSError), _opened(_ask_file(lease.folder, gpu.uuid)) as handle:
            mark, _, name = _read_page(handle)[:160].partition(" ")
            if mark == lease.mark:
                return f"{name if name.isprintable() and name else 'somebody'} asked for {gpu.label}"
    return None


def locked_page(file: Path) -> str | None:
    """Return the text of a file that a living process holds locked ("" before it is written), else None.

    Raises OSError, naming the file, when it is not a regular file or this user may not open it.
    """
    try:
        with _opened(file) as handle:
            return _read_page(handle) if is_locked(handle) else None
    except FileNotFoundError:
        return None


def _user_name() -> str:
    """Return the name of this process's user."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def _mark(pid: int, since: datetime) -> str:
    # Identifies the lease that a request is for. Comparing the request's age instead would fail when the
    # clock is set: requests would be ignored, or every later run would give way.
    return f"{pid}@{since.timestamp():.6f}"


def _lock_file(folder: Path, uuid: str) -> Path:
    return folder / f"gpu-{uuid.replace('/', '_')}.lock"


def _ask_file(folder: Path, uuid: str) -> Path:
    return _lock_file(folder, uuid).with_suffix(".asked")


def _open_regular(file: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, but neither a link nor a file with a second hard link. Raises OSError, naming the
    file."""
    # O_NONBLOCK: opening another user's FIFO would wait for a writer that never comes
    handle = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(handle)
    if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
        return handle
    os.close(handle)
    raise OSError(f"{file}: is not a regular file with one name")


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    handle = _open_regular(file)
    try:
        yield handle
    finally:
        os.close(handle)


def _open_shared(file: Path) -> int:
    # Not one open with O_CREAT: in a sticky folder the kernel refuses that for an existing file of another
    # user (fs.protected_regular).
    while True:
        with suppress(FileNotFoundError):
            return _open_regular(file, os.O_RDWR)
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:  # another process was faster: open its file
            continue
        os.fchmod(handle, 0o666)  # whatever the umask: every user has to lock it
        return handle


def _write_page(handle: int, text: str) -> None:
    # In place, not write-and-rename: the lock is on this file, and a new one would be a second lock.
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def _read_page(handle: int) -> str:
    return os.pread(handle, _MAX_BYTES, 0).decode(errors="replace")


def _lock_now(handle: int) -> None:
    """Lock a file. Raises BlockingIOError when another process holds it."""
    for _ in range(3):
        if lock(handle):
            return
        time.sleep(0.005)  # `is_locked` in another process takes the lock for a moment
    raise BlockingIOError
