"""Wait for GPUs, first come, first served. A run leases all the GPUs that it needs at once, or none.

A waiting run holds a numbered ticket, which is a locked file. Later runs do not take GPUs that an earlier
ticket can use; otherwise runs that need one GPU would overtake a run that needs three for ever. A ticket
whose GPUs other users' processes occupy does not block later runs.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import Field

from dphybrid.config.settings import Settings
from dphybrid.gpus.inventory import LOOK_EVERY_S, Gpu, Inventory, busy_reason, visible
from dphybrid.gpus.leases import Holder, Lease, find_holder, held_page, lease_folder, try_lease, write_page
from dphybrid.util.errors import UserError, counted
from dphybrid.util.hours import parse_training_hours
from dphybrid.util.locks import lock
from dphybrid.util.stop import StopRequest

_NUMBERED = re.compile(r"\d{20}-\d+\.ticket")


@dataclass(frozen=True)
class Wanted:
    """Which GPUs a run needs.

    count: any `count` GPUs; 0 means all that are free, at least one, and at most `at_most` if that is not 0.
    numbers: exactly these GPUs, as torch numbers the visible ones.
    """

    count: int = 0
    numbers: tuple[int, ...] = ()
    at_most: int = 0

    @property
    def least(self) -> int:
        return len(self.numbers) or max(1, self.count)


class _Ticket(Holder):
    """A waiting run: the GPUs that it can use, and how many of them it needs at least."""

    uuids: frozenset[str]
    least: int = Field(ge=1)


def acquire(
    wanted: Wanted,
    inventory: Inventory,
    settings: Settings,
    *,
    run: str,
    on_wait: Callable[[str], None],
    stop: StopRequest | None = None,
) -> Lease:
    """Wait until the GPUs are free at two looks in a row, not leased, and training hours are open; then lease
    them.

    Raises UserError for GPUs that do not exist or did not come free in time, and Interrupted when `stop` was
    asked.

    Args:
        run: The run's name, shown to other users.
        on_wait: Called with the reason for waiting whenever it changes.
        stop: A request that ends the waiting.
    """
    # Found once: a later reading that fails is no reason to give up.
    eligible = _eligible(wanted, visible(inventory.read()))
    search = _Search(wanted, eligible, inventory, lease_folder(settings.lease_dir), run, settings)
    hours, told, waited_s = parse_training_hours(settings.training_hours), "", 0.0
    with ExitStack() as queued:
        number = ""
        while True:
            if stop:
                stop.obey()
            began = time.monotonic()
            # Local time: training hours are written in this machine's time zone.
            closed = why = hours.closed_reason(datetime.now())
            if closed:
                # A ticket would reserve GPUs that others may use now.
                queued.close()
                number, search.seen_free = "", frozenset()
            else:
                number = number or _take_ticket(search, queued)
                lease, why = search.look(number)
                if lease:
                    return lease
                if waited_s > settings.gpu_wait_s and waited_s > LOOK_EVERY_S:
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


@dataclass
class _Search:
    """The arguments of `acquire` and the last observation. eligible: the GPUs that the run may take.
    seen_free: UUIDs of those that were free at the last look."""

    wanted: Wanted
    eligible: list[Gpu]
    inventory: Inventory
    folder: Path
    run: str
    settings: Settings
    seen_free: frozenset[str] = frozenset()

    def look(self, number: str) -> tuple[Lease | None, str]:
        """Read the GPUs once and lease those that this run may take; return (lease, reason for having none).

        number: the name of this run's ticket.
        """
        uuids = {gpu.uuid for gpu in self.eligible}
        units = [gpu for gpu in visible(self.inventory.read()) if gpu.uuid in uuids]
        free, leased, busy = _states(units, self.folder, self.settings)
        ready = [gpu for gpu in free if gpu.uuid in self.seen_free]
        self.seen_free = frozenset(gpu.uuid for gpu in free)
        # Names begin with a time of fixed width, so the smaller name is the older ticket.
        ahead = [ticket for name, ticket in _tickets(self.folder).items() if name < number]
        kept = reserved(ahead, free, leased)
        if lease := self._take([gpu for gpu in ready if gpu.uuid not in kept]):
            return lease, ""
        next_ones = [f"{gpu.label}: next is {kept[gpu.uuid].name()}" for gpu in ready if gpu.uuid in kept]
        return None, "; ".join([*busy, *next_ones]) or self.inventory.reason

    def _take(self, free: list[Gpu]) -> Lease | None:
        if len(free) < self.wanted.least:
            return None
        all_of_them = not self.wanted.numbers and not self.wanted.count
        most = self.wanted.at_most or None if all_of_them else self.wanted.least
        return try_lease(self.folder, free[:most], self.run)


def _states(
    gpus: Iterable[Gpu], folder: Path, settings: Settings
) -> tuple[list[Gpu], dict[str, Holder], list[str]]:
    """Return the free GPUs, the holders of the leased ones by UUID, and why each other one is not free."""
    free, leased, reasons = list[Gpu](), dict[str, Holder](), list[str]()
    for gpu in gpus:
        if holder := find_holder(folder, gpu.uuid):
            leased[gpu.uuid] = holder
            reasons.append(f"{gpu.label}: {holder.text()}")
        elif reason := busy_reason(gpu, settings):
            reasons.append(reason)
        else:
            free.append(gpu)
    return free, leased, reasons


def reserved(ahead: Iterable[_Ticket], free: Sequence[Gpu], leased: Collection[str]) -> dict[str, _Ticket]:
    """Return the free GPUs that earlier tickets will take, now or once leases end, by UUID.

    ahead: tickets, oldest first. leased: UUIDs of leased GPUs.
    """
    kept: dict[str, _Ticket] = {}
    for ticket in ahead:
        usable = [gpu.uuid for gpu in free if gpu.uuid in ticket.uuids and gpu.uuid not in kept]
        # Leased GPUs count, as leases end. GPUs that other users' processes occupy do not: nobody knows when
        # those come free, and a ticket that waits for them reserves nothing.
        if len(usable) + len(ticket.uuids.intersection(leased)) >= ticket.least:
            kept |= dict.fromkeys(usable[: ticket.least], ticket)
    return kept


def _eligible(wanted: Wanted, units: Sequence[Gpu]) -> list[Gpu]:
    if missing := [number for number in wanted.numbers if number >= len(units)]:
        there = f"{len(units)} GPUs are visible (see `dphybrid devices`)"
        raise UserError(f"devices: cuda:{missing[0]} does not exist; {there}")
    chosen = [units[number] for number in wanted.numbers] or list(units)
    if len(chosen) < wanted.least:
        raise UserError(
            f"devices: {counted(wanted.least, 'GPU')} wanted, {len(chosen)} visible; ask for fewer, or "
            "change CUDA_VISIBLE_DEVICES"
        )
    return chosen


def _take_ticket(search: _Search, queued: ExitStack) -> str:
    """Make a ticket that `queued` removes; return its name."""
    # The time since boot, because setting the clock does not change it; no lock survives a reboot.
    file = search.folder / f"{time.monotonic_ns():020d}-{os.getpid()}.ticket"
    uuids = frozenset(gpu.uuid for gpu in search.eligible)
    page = _Ticket.own(search.run, uuids=uuids, least=search.wanted.least)
    # Hidden until it is locked: others remove tickets that nobody holds.
    hidden = file.with_name(f".{file.name}")
    handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    queued.callback(os.close, handle)
    lock(handle)
    os.fchmod(handle, 0o644)  # whatever the umask: every user has to read it
    write_page(handle, page.model_dump_json())
    hidden.rename(file)
    queued.callback(file.unlink, missing_ok=True)
    return file.name


def _tickets(folder: Path) -> dict[str, _Ticket]:
    """Return the tickets of waiting runs by name, oldest first. Removes those of dead processes."""
    tickets = dict[str, _Ticket]()
    for name in sorted(filter(_NUMBERED.fullmatch, os.listdir(folder))):
        if ticket := held_page(folder / name, _Ticket):
            tickets[name] = ticket
        else:
            with suppress(OSError):  # another user's
                (folder / name).unlink()
    return tickets


def free_now(inventory: Inventory, settings: Settings) -> tuple[int, set[int]] | None:
    """Return how many GPUs nobody uses or waits for at this moment, and the processes that hold leases or
    wait; None without GPUs."""
    units = visible(inventory.read())
    if not units:
        return (0, set()) if inventory.broken else None
    folder = lease_folder(settings.lease_dir)
    tickets = _tickets(folder)
    free, leased, _ = _states(units, folder, settings)
    count = len(free) - len(reserved(tickets.values(), free, leased))
    if parse_training_hours(settings.training_hours).closed_reason(datetime.now()):
        count = 0
    return count, {who.pid for who in (*leased.values(), *tickets.values())}
