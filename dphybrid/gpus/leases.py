"""GPU leases: while a process uses a GPU, it holds a file `gpu-UUID.TICKS-PID.lock` locked. The kernel
releases the lock however the process ends.

Each process makes files of its own and locks no other's, and the folder is sticky. So whatever another
account puts there (a pipe, a link, a folder, a file that nobody may read) is no lease and stops nobody; and
nobody can remove or replace the files of others. A file's text says which run holds the lease, for people to
read.
"""

import os
import pwd
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from dphybrid.gpus.inventory import Gpu, clock_time
from dphybrid.util.alive import lives, process_name
from dphybrid.util.errors import UserError
from dphybrid.util.locks import is_locked, lock, stands_at

_FALLBACK = Path("/tmp/dphybrid-leases")  # noqa: S108 - its owner, mode and files are looked at before use
"""Used where only root may write to /var/lock. All users must share one folder, so it cannot be in a home."""
_MAX_BYTES = 65536
_SHOWN = 300
_OTHERS_LEAVE_S = 1.0
"""How long the older of two processes that want the same GPU at the same moment waits for the younger one to
leave it."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds characters that cannot be printed")
    return text


_ShownText = Annotated[str, Field(max_length=_SHOWN), AfterValidator(_printable)]
"""Text from another user's file that is printed on a terminal: no control characters, limited length."""


class Holder(BaseModel):
    """Who holds a lease or waits for one: the text of a locked file. process: its name, "" in files of other
    origin. uid: the file's owner."""

    model_config = ConfigDict(frozen=True)

    pid: int = Field(default=0, ge=0)
    process: _ShownText = ""
    run: _ShownText = "that is starting"
    since: AwareDatetime = Field(default_factory=lambda: datetime.now().astimezone())
    uid: int = Field(default=0, exclude=True)

    @property
    def user(self) -> str:
        return _user_name(self.uid)

    @classmethod
    def own(cls, run: str, **more: object) -> Self:
        """Return the page of this process for a run, whatever the run's name holds."""
        shown = "".join(letter if letter.isprintable() else "?" for letter in run[:_SHOWN])
        return cls.model_validate({"pid": os.getpid(), "process": process_name(), "run": shown} | more)

    def name(self) -> str:
        return f"{self.user}'s run {self.run} since {clock_time(self.since)} (pid {self.pid})"

    def text(self) -> str:
        return f"leased to {self.name()}"


class Lease:
    """The right to use some GPUs until `release`, the end of the `with` block, or the end of this process."""

    def __init__(self, gpus: Sequence[Gpu], folder: Path, files: dict[Path, int], mark: str) -> None:
        self.gpus = tuple(gpus)
        self.folder = folder
        self.mark = mark
        self._files = files
        _open_leases.add(self)

    def release(self) -> None:
        """Give the GPUs back."""
        for file in self._files:
            file.unlink(missing_ok=True)
        self._close()

    def lost(self) -> str | None:
        """Return that a lock file has been removed, so that others can lease its GPU too, or None."""
        for file, handle in self._files.items():
            if not stands_at(file, handle):
                gpu = next(gpu for gpu in self.gpus if file.name.startswith(_prefix(gpu.uuid)))
                return f"{gpu.label}: its lock file was removed, so another run may lease it"
        return None

    def _close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_H = TypeVar("_H", bound=Holder)
_open_leases: "weakref.WeakSet[Lease]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for lease in list(_open_leases):
        lease._close()


# A forked child shares the lock: it would keep the GPU leased after its parent is killed.
os.register_at_fork(after_in_child=_forget_in_child)


def lease_folder(wanted: Path) -> Path:
    """Return the folder of the lock files; create it, writable for all users, if needed.

    Raises UserError when it cannot be written to, or when another user could remove others' locks.
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
        if fault := _fault(folder):
            raise UserError(
                f"DPHYBRID_LEASE_DIR={str(wanted)!r}: {fault}; as root, run `rm -rf {folder}; install -d -m "
                f"1777 -o root {folder}`"
            )
        if os.access(folder, os.W_OK):
            return folder
    command = f"install -d -m 1777 -o root {wanted}"
    raise UserError(f"DPHYBRID_LEASE_DIR={str(wanted)!r}: cannot be written; run `{command}` as root")


def _fault(folder: Path) -> str | None:
    """Return why a folder is not safe to share, or None. It belongs to root or to this user, or to a group of
    this user that alone may write there; and it is sticky if others may write."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        return f"{folder} is not a folder"
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        return f"{folder} is not sticky, so any user can remove other users' files"
    groups = {os.getgid(), *os.getgroups()}
    in_group = facts.st_mode & 0o020 and not facts.st_mode & 0o002 and facts.st_gid in groups
    if facts.st_uid not in (0, os.getuid()) and not in_group:
        return f"{folder} belongs to user {_user_name(facts.st_uid)}, who can remove other users' files"
    return None


def try_lease(folder: Path, gpus: Sequence[Gpu], run: str) -> Lease | None:
    """Lease all of `gpus`, or none of them. Returns None when another run holds one."""
    holder = Holder.own(run)
    name = f"{new_number()}.lock"
    files: dict[Path, int] = {}
    for gpu in gpus:
        file = folder / f"{_prefix(gpu.uuid)}{name}"
        files[file] = make_locked(file, holder)
    lease = Lease(gpus, folder, files, _mark(holder.pid, holder.since))
    deadline = time.monotonic() + _OTHERS_LEAVE_S
    # A run that has its lease made its files before ours. A run that makes its own just now sees ours, too:
    # then the younger one leaves.
    while others := [
        other for gpu in gpus for other in _locked_files(folder, gpu.uuid) if other not in files
    ]:
        younger = all(_number(other) > name for other in others)
        if not younger or time.monotonic() > deadline:
            lease.release()
            return None
        time.sleep(0.005)
    return lease


def find_holder(folder: Path, uuid: str) -> Holder | None:
    """Return who holds the lease of a GPU, or None."""
    return next((holder for _, holder in sorted(_locked_files(folder, uuid).items())), None)


def _locked_files(folder: Path, uuid: str) -> dict[Path, Holder]:
    """Return the lock files of a GPU that living processes hold, with their holders. Removes those of dead
    processes."""
    found = {}
    for name in os.listdir(folder):
        if name.startswith(_prefix(uuid)) and name.endswith(".lock"):
            # Another page was not written by dphybrid, and its file is locked all the same.
            holder = held_by(folder / name, Holder, Holder())
            if holder is not None:
                found[folder / name] = holder
    return found


def ask_for(folder: Path, gpu: Gpu) -> str:
    """Ask the run that holds a GPU to give it back; return a message that says what was done."""
    holder = find_holder(folder, gpu.uuid)
    if holder is None:
        return f"{gpu.label} is not leased, so there is no run to ask"
    for file in _requests(folder, gpu.uuid):
        with suppress(OSError):  # somebody else's, which stays
            file.unlink()
    handle, _ = tempfile.mkstemp(".asked", _prefix(gpu.uuid), folder)
    os.write(handle, _mark(holder.pid, holder.since).encode())
    os.fchmod(handle, 0o644)
    os.close(handle)
    asked = "asked to give way (it will unless its DPHYBRID_YIELD_TO_OTHERS is never)"
    return f"{gpu.label} is {holder.text()}; {asked}"


def asked_by(lease: Lease) -> str | None:
    """Return who has asked for a GPU of this lease, or None."""
    for gpu in lease.gpus:
        for file in _requests(lease.folder, gpu.uuid):
            # suppress: the file is not a request, or has just been removed
            with suppress(OSError), _opened(file) as handle:
                if os.pread(handle, 160, 0).decode(errors="replace") == lease.mark:
                    return f"{_user_name(os.fstat(handle).st_uid)} asked for {gpu.label}"
    return None


def _requests(folder: Path, uuid: str) -> list[Path]:
    names = [n for n in os.listdir(folder) if n.startswith(_prefix(uuid)) and n.endswith(".asked")]
    return [folder / name for name in names]


def new_number() -> str:
    """Return a name for a file of this process; those of later calls on this machine come after it."""
    # The time since boot, because setting the clock does not change it; no lock survives a reboot.
    return f"{time.monotonic_ns():020d}-{os.getpid()}"


def make_locked(file: Path, page: Holder) -> int:
    """Make a file with a page and hold it locked; return its handle. Others may open it only once it is
    locked: else another account could lock it first."""
    hidden = file.with_name(f".{file.name}")
    handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    lock(handle)
    os.write(handle, page.model_dump_json().encode())
    os.fchmod(handle, 0o644)  # whatever the umask: every user has to read it
    hidden.rename(file)
    return handle


def held_by(file: Path, kind: type[_H], otherwise: _H | None = None) -> _H | None:
    """Return the page of a file that the process which made it holds locked; `otherwise` if the page is of
    another form. None for all else that may be in its place.

    The lock alone does not tell: another account may lock the file of a dead process. Removes the file of a
    dead process, if it is this user's.
    """
    with suppress(OSError):
        with _opened(file) as handle:
            if is_locked(handle):
                try:
                    page = kind.model_validate_json(os.pread(handle, _MAX_BYTES, 0))
                except ValidationError:
                    return otherwise
                if lives(page.process) is not False:
                    return page.model_copy(update={"uid": os.fstat(handle).st_uid})
        file.unlink()
    return None


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    """Open a regular file with one name. Raises OSError for other kinds, and for unreadable ones."""
    # O_NONBLOCK: opening another user's FIFO would wait for a writer that never comes.
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(handle)
        # One name: another user could give somebody's locked file a second one.
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
            raise OSError(f"{file}: is not a regular file with one name")
        yield handle
    finally:
        os.close(handle)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _mark(pid: int, since: datetime) -> str:
    # Identifies the lease that a request is for. Comparing the request's age instead would fail when the
    # clock is set: requests would be ignored, or every later run would give way.
    return f"{pid}@{since.timestamp():.6f}"


def _prefix(uuid: str) -> str:
    return f"gpu-{uuid.replace('/', '_')}."


def _number(file: Path) -> str:
    """Return the part of a lock file's name that says when it was made."""
    return file.name.split(".", 1)[1]
