"""Lease the GPUs of a shared workstation, first come, first served. A run leases all the GPUs that it needs
at once, or none.

In a folder that all users of the machine share, a process that uses a GPU holds the file `gpu-UUID.lock`
locked, and a waiting run holds a numbered ticket. Later runs do not take GPUs that an earlier ticket can use;
otherwise runs that need one GPU would overtake a run that needs three for ever. The kernel releases a lock
however its process ends.

The first line of a locked file says which run holds it, and a second line who asks for the GPU. Whoever may
write in the folder may also lock a file or write its page: accounts of one machine trust each other.
"""

import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from dphybrid.config.settings import Settings
from dphybrid.gpus.inventory import LOOK_EVERY_S, Gpu, Inventory, busy_reason, clock_time, visible
from dphybrid.util.errors import UserError, counted
from dphybrid.util.hours import parse_training_hours
from dphybrid.util.locks import NO_LINK, is_locked, lock
from dphybrid.util.stop import StopRequest
from dphybrid.util.text import printable

_FALLBACK = Path("/tmp/dphybrid-leases")  # noqa: S108 - its files are locks, and links among them are not followed
"""Used where only root may write to /var/lock. All users must share one folder, so it cannot be in a home."""
_TICKET = re.compile(r"\d{20}-\d+\.ticket")
_MAX_BYTES = 65536


class Holder(BaseModel):
    """A run that holds a locked file: its page. The defaults stand for a page that cannot be read.

    uuids, least: of a waiting run, the GPUs that it can use, and how many of them it needs at least.
    """

    model_config = ConfigDict(frozen=True)

    user: str = "somebody"
    run: str = "that is starting"
    pid: int = 0
    since: AwareDatetime = Field(default_factory=lambda: datetime.now().astimezone())
    uuids: frozenset[str] = frozenset()
    least: int = Field(default=1, ge=1)

    @classmethod
    def own(cls, run: str, uuids: frozenset[str] = frozenset(), least: int = 1) -> Self:
        """Return the page of this process for a run."""
        return cls(user=_own_name(), run=run, pid=os.getpid(), uuids=uuids, least=least)

    def name(self) -> str:
        since = f"since {clock_time(self.since)} (pid {self.pid})"
        return printable(f"{self.user}'s run {self.run} {since}")

    def text(self) -> str:
        return f"leased to {self.name()}"


def _own_name() -> str:
    import psutil  # here, because `--help` need not wait for it

    return psutil.Process().username()


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


_held_files: "weakref.WeakSet[FileIO]" = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_held_files):
        file.close()


# A forked child shares the locks: it would keep a GPU leased after its parent is killed.
os.register_at_fork(after_in_child=_close_in_child)


def _hold(path: Path) -> FileIO | None:
    """Lock a file of the shared folder until it is closed. Returns None if it is locked already."""
    file = FileIO(_open_shared(path), "r+")
    if not lock(file.fileno()):
        file.close()
        return None
    _held_files.add(file)
    return file


def _write_page(file: FileIO, page: Holder) -> None:
    file.truncate(0)
    file.write(page.model_dump_json().encode())


def _open_shared(path: Path) -> int:
    """Open a file that every user of the folder may lock and write; create it if it is missing."""
    flags = os.O_RDWR | NO_LINK
    with suppress(FileNotFoundError):
        # Without O_CREAT: in a sticky folder, Linux refuses it for an existing file of another user.
        return os.open(path, flags)
    try:
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # another process was faster
        return os.open(path, flags)
    os.fchmod(handle, 0o666)  # whatever the umask
    return handle


def _holder_of(path: Path) -> Holder | None:
    """Return who holds a file locked; None if nobody does, or if the file cannot be opened."""
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINK)
    except OSError:
        return None
    try:
        page = os.pread(handle, _MAX_BYTES, 0).partition(b"\n")[0]
        return Holder.model_validate_json(page) if is_locked(handle) else None
    except ValidationError:  # while it is being written, say
        return Holder()
    finally:
        os.close(handle)


def _lock_file(folder: Path, uuid: str) -> Path:
    return folder / f"gpu-{uuid.replace('/', '_')}.lock"


@dataclass(frozen=True)
class Lease:
    """The right to use some GPUs until `release`, the end of the `with` block, or the end of this process.
    files: the locked files of the GPUs."""

    gpus: tuple[Gpu, ...]
    files: tuple[FileIO, ...]

    def release(self) -> None:
        """Give the GPUs back."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lease(folder: Path, gpus: Sequence[Gpu], run: str) -> Lease | None:
    """Lease all of `gpus`, or none of them. Returns None when another run holds one."""
    files = list[FileIO]()
    for gpu in gpus:
        file = _hold(_lock_file(folder, gpu.uuid))
        if file is None:
            for taken in files:
                taken.close()
            return None
        files.append(file)
    for file in files:
        _write_page(file, Holder.own(run))
    return Lease(tuple(gpus), tuple(files))


def find_holder(folder: Path, uuid: str) -> Holder | None:
    """Return who holds the lease of a GPU, or None."""
    return _holder_of(_lock_file(folder, uuid))


def ask_for(folder: Path, gpu: Gpu) -> str:
    """Ask the run that holds a GPU to give it back; return a message that says what was done."""
    holder = find_holder(folder, gpu.uuid)
    if holder is None:
        return f"{gpu.label} is not leased, so there is no run to ask"
    # The next lease of this GPU writes its page anew: a request is for one lease only.
    handle = os.open(_lock_file(folder, gpu.uuid), os.O_WRONLY | os.O_APPEND | NO_LINK)
    os.write(handle, f"\n{_own_name()}".encode())
    os.close(handle)
    return f"{gpu.label} is {holder.text()}; asked to give way"


def asked_by(lease: Lease) -> str | None:
    """Return who has asked for a GPU of this lease, or None."""
    for gpu, file in zip(lease.gpus, lease.files, strict=True):
        _, *users = os.pread(file.fileno(), _MAX_BYTES, 0).decode(errors="replace").split("\n")
        if users:
            return printable(f"{users[0]} asked for {gpu.label}")
    return None


@dataclass(frozen=True)
class Wanted:
    """Which GPUs a run needs: at least `least` of `gpus`, and at most `most`."""

    gpus: tuple[Gpu, ...]
    least: int
    most: int


def acquire(
    wanted: Wanted,
    inventory: Inventory,
    settings: Settings,
    *,
    run: str,
    on_wait: Callable[[str], None],
    stop: StopRequest | None = None,
) -> Lease:
    """Wait until the GPUs are free, not leased, and training hours are open; then lease them.

    Raises UserError for GPUs that did not come free in time, and Interrupted when `stop` was asked.

    Args:
        run: The run's name, shown to other users.
        on_wait: Called with the reason for waiting whenever it changes.
        stop: A request that ends the waiting.
    """
    uuids = frozenset(gpu.uuid for gpu in wanted.gpus)
    folder, hours = lease_folder(settings.lease_dir), parse_training_hours(settings.training_hours)
    ticket, told, waited_s = "", "", 0.0
    with ExitStack() as queued:
        while True:
            if stop:
                stop.obey()
            began = time.monotonic()
            # Local time: training hours are written in this machine's time zone.
            closed = why = hours.closed_reason(datetime.now())
            if closed:
                # A ticket would reserve GPUs that others may use now.
                queued.close()
                ticket = ""
            else:
                ticket = ticket or _take_ticket(folder, Holder.own(run, uuids, wanted.least), queued)
                now = _look(visible(inventory.read()), folder, settings, ticket)
                free = [gpu for gpu in now.free if gpu.uuid in uuids]
                chosen = [gpu for gpu in free if gpu.uuid not in now.reserved][: wanted.most]
                if len(chosen) >= wanted.least and (lease := try_lease(folder, chosen, run)):
                    return lease
                reasons = [reason for uuid, reason in now.taken.items() if uuid in uuids]
                for gpu in free:
                    if gpu.uuid in now.reserved:
                        reasons.append(f"{gpu.label}: next is {now.reserved[gpu.uuid].name()}")
                why = "; ".join(reasons) or inventory.reason
                if waited_s >= settings.gpu_wait_s:
                    raise UserError(
                        f"{counted(wanted.least, 'GPU')} did not come free within {settings.gpu_wait_s:.0f} "
                        f"s: {why or 'another run was faster'}; try later, raise DPHYBRID_GPU_WAIT_S, or use "
                        "devices=cpu"
                    )
            if why and why != told:
                told = why
                on_wait(why)
            time.sleep(LOOK_EVERY_S)
            if not closed:  # closed hours are no time in which GPUs could come free
                waited_s += time.monotonic() - began


def _take_ticket(folder: Path, page: Holder, queued: ExitStack) -> str:
    """Make a ticket that `queued` removes; return its name."""
    # The time since boot, because setting the clock does not change it; no lock survives a reboot.
    file = folder / f"{time.monotonic_ns():020d}-{os.getpid()}.ticket"
    # Hidden until it is locked: others remove tickets that nobody holds.
    hidden = file.with_name(f".{file.name}")
    held = _hold(hidden)
    assert held is not None  # nobody else uses this name
    queued.callback(held.close)
    _write_page(held, page)
    hidden.rename(file)
    queued.callback(file.unlink, missing_ok=True)
    return file.name


def _tickets(folder: Path) -> dict[str, Holder]:
    """Return the waiting runs by their tickets' names, oldest first. Removes tickets of dead processes."""
    tickets = dict[str, Holder]()
    # Names begin with a time of fixed width.
    for name in sorted(filter(_TICKET.fullmatch, os.listdir(folder))):
        if holder := _holder_of(folder / name):
            tickets[name] = holder
        else:
            with suppress(OSError):  # another user's
                (folder / name).unlink()
    return tickets


@dataclass(frozen=True)
class _Look:
    """The visible GPUs at one moment.

    free: Those that nobody uses. taken: UUID of each other one -> the reason. reserved: UUIDs of free ones
    that waiting runs will take, now or once leases end. pids: the processes that hold leases or wait.
    """

    free: list[Gpu]
    taken: dict[str, str]
    reserved: dict[str, Holder]
    pids: set[int]


def _look(units: Sequence[Gpu], folder: Path, settings: Settings, ticket: str = "") -> _Look:
    """Look at GPUs that were just read. ticket: name of the caller's ticket; later ones reserve nothing."""
    waiting = _tickets(folder)
    free, taken, leased = list[Gpu](), dict[str, str](), dict[str, Holder]()
    for gpu in units:
        if holder := find_holder(folder, gpu.uuid):
            leased[gpu.uuid] = holder
            taken[gpu.uuid] = f"{gpu.label}: {holder.text()}"
        elif reason := busy_reason(gpu, settings):
            taken[gpu.uuid] = reason
        else:
            free.append(gpu)
    reserved = dict[str, Holder]()
    for name, holder in waiting.items():
        if ticket and name >= ticket:
            break
        usable = [gpu.uuid for gpu in free if gpu.uuid in holder.uuids and gpu.uuid not in reserved]
        # Leased GPUs count, as leases end. GPUs that other users' processes occupy do not: nobody knows when
        # those come free, and a ticket that waits for them reserves nothing.
        if len(usable) + len(holder.uuids.intersection(leased)) >= holder.least:
            reserved |= dict.fromkeys(usable[: holder.least], holder)
    return _Look(free, taken, reserved, {who.pid for who in (*leased.values(), *waiting.values())})


def free_now(inventory: Inventory, settings: Settings) -> tuple[int, set[int]] | None:
    """Return how many GPUs nobody uses or waits for at this moment, and the processes that hold leases or
    wait; None without GPUs."""
    units = visible(inventory.read())
    if not units:
        return (0, set()) if inventory.broken else None
    now = _look(units, lease_folder(settings.lease_dir), settings)
    closed = parse_training_hours(settings.training_hours).closed_reason(datetime.now())
    return 0 if closed else len(now.free) - len(now.reserved), now.pids
