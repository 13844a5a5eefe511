"""GPU leases: a process that uses a GPU holds the file `gpu-UUID.lock` locked, in a folder that all users of
the machine share. The kernel releases the lock however the process ends.

A locked file's page says which run holds it, for people to read. Whoever may write in the folder may also
lock a file or write its page: accounts of one machine trust each other.
"""

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Self, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from dphybrid.gpus.inventory import Gpu, clock_time
from dphybrid.util.errors import UserError
from dphybrid.util.files import user_name
from dphybrid.util.locks import NO_LINK, is_locked, lock

_FALLBACK = Path("/tmp/dphybrid-leases")  # noqa: S108 - its files are locks, and links among them are not followed
"""Used where only root may write to /var/lock. All users must share one folder, so it cannot be in a home."""
_MAX_BYTES = 65536
_SHOWN = 300


def _shown(text: str) -> str:
    """Return text of another user's file for a terminal: one line without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_SHOWN])


class Holder(BaseModel):
    """Who holds a locked file: its page. The defaults stand for a page that cannot be read."""

    model_config = ConfigDict(frozen=True)

    user: str = "somebody"
    run: str = "that is starting"
    pid: int = 0
    since: AwareDatetime = Field(default_factory=lambda: datetime.now().astimezone())

    @classmethod
    def own(cls, run: str, **more: object) -> Self:
        """Return the page of this process for a run."""
        return cls.model_validate({"user": user_name(os.getuid()), "run": run, "pid": os.getpid()} | more)

    @property
    def mark(self) -> str:
        """A text that identifies this lease: a request to give way is for one lease only."""
        return f"{self.pid}@{self.since.timestamp():.6f}"

    def name(self) -> str:
        user, run = _shown(self.user), _shown(self.run)
        return f"{user}'s run {run} since {clock_time(self.since)} (pid {self.pid})"

    def text(self) -> str:
        return f"leased to {self.name()}"


_Page = TypeVar("_Page", bound=Holder)


class Lease:
    """The right to use some GPUs until `release`, the end of the `with` block, or the end of this process."""

    def __init__(self, gpus: Sequence[Gpu], folder: Path, handles: list[int], holder: Holder) -> None:
        self.gpus, self.folder, self.holder = tuple(gpus), folder, holder
        self._handles = handles
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

    def __exit__(self, *_: object) -> None:
        self.release()


_open_leases: "weakref.WeakSet[Lease]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for lease in list(_open_leases):
        lease._close()


# A forked child shares the lock: it would keep the GPU leased after its parent is killed.
os.register_at_fork(after_in_child=_forget_in_child)


def lease_folder(wanted: Path) -> Path:
    """Return the folder of the lock files; create it, writable for all users, if needed. Raises UserError
    when it cannot be written to."""
    for folder in (wanted, _FALLBACK):
        with suppress(OSError):
            if not folder.is_dir():
                folder.mkdir(parents=True)
                folder.chmod(0o1777)  # whatever the umask
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    raise UserError(
        f"DPHYBRID_LEASE_DIR={str(wanted)!r}: cannot be written; run `install -d -m 1777 {wanted}` as root"
    )


def try_lease(folder: Path, gpus: Sequence[Gpu], run: str) -> Lease | None:
    """Lease all of `gpus`, or none of them. Returns None when another run holds one."""
    holder = Holder.own(run)
    handles = list[int]()
    for gpu in gpus:
        handle = _open_shared(_lock_file(folder, gpu.uuid))
        handles.append(handle)
        if not lock(handle):
            for taken in handles:
                os.close(taken)
            return None
    for handle in handles:
        write_page(handle, holder.model_dump_json())
    return Lease(gpus, folder, handles, holder)


def find_holder(folder: Path, uuid: str) -> Holder | None:
    """Return who holds the lease of a GPU, or None."""
    return held_page(_lock_file(folder, uuid), Holder, Holder())


def held_page(file: Path, kind: type[_Page], otherwise: _Page | None = None) -> _Page | None:
    """Return the page of a file that a process holds locked: `otherwise` for a page of another form, as while
    it is being written. None if nobody holds it, or if it cannot be opened."""
    try:
        handle = os.open(file, os.O_RDONLY | NO_LINK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return kind.model_validate_json(os.pread(handle, _MAX_BYTES, 0)) if is_locked(handle) else None
    except ValidationError:
        return otherwise
    finally:
        os.close(handle)


def ask_for(folder: Path, gpu: Gpu) -> str:
    """Ask the run that holds a GPU to give it back; return a message that says what was done."""
    holder = find_holder(folder, gpu.uuid)
    if holder is None:
        return f"{gpu.label} is not leased, so there is no run to ask"
    handle = _open_shared(_request_file(folder, gpu.uuid))
    write_page(handle, f"{holder.mark} {user_name(os.getuid())}")
    os.close(handle)
    asked = "asked to give way (it will unless its DPHYBRID_YIELD_TO_OTHERS is never)"
    return f"{gpu.label} is {holder.text()}; {asked}"


def asked_by(lease: Lease) -> str | None:
    """Return who has asked for a GPU of this lease, or None."""
    for gpu in lease.gpus:
        with suppress(OSError, UnicodeDecodeError):  # nobody has asked
            request = _request_file(lease.folder, gpu.uuid).read_text(encoding="utf-8")
            mark, _, user = request.partition(" ")
            if mark == lease.holder.mark:
                return f"{_shown(user)} asked for {gpu.label}"
    return None


def write_page(handle: int, text: str) -> None:
    """Replace the content of an open file."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def _open_shared(file: Path) -> int:
    """Open a file that every user of the folder may lock and write; create it if it is missing."""
    flags = os.O_RDWR | NO_LINK | os.O_CLOEXEC
    with suppress(FileNotFoundError):
        # Without O_CREAT: in a sticky folder, Linux refuses it for an existing file of another user.
        return os.open(file, flags)
    try:
        handle = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # another process was faster
        return os.open(file, flags)
    os.fchmod(handle, 0o666)  # whatever the umask
    return handle


def _lock_file(folder: Path, uuid: str) -> Path:
    return folder / f"gpu-{uuid.replace('/', '_')}.lock"


def _request_file(folder: Path, uuid: str) -> Path:
    return _lock_file(folder, uuid).with_suffix(".asked")
