"""Wait for GPUs, first come, first served. A run leases all the GPUs that it needs at once, or none.

A waiting run holds a numbered ticket, which is a locked file. Later runs do not take GPUs that an earlier
ticket can use; otherwise runs that need one GPU would overtake a run that needs three for ever. A ticket that
cannot be served because other users' processes occupy its GPUs, or that does not take its turn, does not
block later runs.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path

from pydantic import Field

from dphybrid.config.settings import Settings
from dphybrid.gpus.inventory import Gpu, Inventory, busy_reason, visible
from dphybrid.gpus.leases import (
    Holder,
    Lease,
    find_holder,
    held_by,
    lease_folder,
    make_locked,
    new_number,
    try_lease,
)
from dphybrid.util.errors import UserError, counted
from dphybrid.util.hours import parse_training_hours
from dphybrid.util.stop import StopRequest

_NUMBERED = re.compile(r"\d{20}-\d+\.ticket")
_TURN_S = 60.0
"""How long a ticket keeps free GPUs from later ones without taking them: many times `gpu_window_s`."""


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


class Turns:
    """The one rule of the queue: which free GPUs earlier tickets reserve. It remembers since when a ticket
    could have been served: one that does not take its GPUs loses its turn, so that it stops nobody."""

    def __init__(self) -> None:
        self._could_since: dict[str, float] = {}

    def reserved(
        self, ahead: Mapping[str, _Ticket], free: Sequence[Gpu], leased: Collection[str]
    ) -> dict[str, _Ticket]:
        """Return the free GPUs that earlier tickets will take, now or once leases end, by UUID.

        ahead: tickets by name, oldest first. leased: UUIDs of leased GPUs.
        """
        reserved: dict[str, _Ticket] = {}
        for name, ticket in ahead.items():
            usable = [gpu.uuid for gpu in free if gpu.uuid in ticket.uuids and gpu.uuid not in reserved]
            if len(usable) < ticket.least:
                self._could_since.pop(name, None)
            elif time.monotonic() - self._could_since.setdefault(name, time.monotonic()) > _TURN_S:
                continue
            # Leased GPUs count, as leases end. GPUs that other users' processes occupy do not: nobody knows
            # when those come free, and a ticket that waits for them reserves nothing.
            if len(usable) + len(ticket.uuids.intersection(leased)) >= ticket.least:
                reserved |= dict.fromkeys(usable[: ticket.least], ticket)
        return reserved


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

    Raises UserError for GPUs that do not exist or did not come free in time, and Interrupted when `stop` was
    asked.

    Args:
        run: The run's name, shown to other users.
        on_wait: Called with the reason for waiting whenever it changes.
        stop: A request that ends the waiting.
    """
    window_s, poll_s, timeout_s = settings.gpu_window_s, settings.gpu_poll_s, settings.gpu_wait_s
    # At least two windows, even with a timeout of 0: a GPU must be seen free for a whole window.
    deadline = time.monotonic() + max(timeout_s, 2 * window_s + 2 * poll_s)
    hours, last_reason = parse_training_hours(settings.training_hours), ""
    search = _Search(wanted, inventory, lease_folder(settings.lease_dir), run, settings)
    _ = search.eligible  # a run that can never be served need not wait for the hours

    # Local time: training hours are written in this machine's time zone.
    def closed() -> str | None:
        return hours.closed_reason(datetime.now())

    def wait(why: str) -> None:
        nonlocal last_reason
        if stop:
            stop.obey()
        if time.monotonic() >= deadline:
            raise UserError(
                f"{counted(wanted.least, 'GPU')} did not come free within {timeout_s:.0f} s: "
                f"{why or 'another run was faster'}; try later, raise DPHYBRID_GPU_WAIT_S, or use devices=cpu"
            )
        if why and why != last_reason:
            last_reason = why
            on_wait(why)
        time.sleep(poll_s)

    while True:
        if shut := closed():
            before = time.monotonic()
            wait(shut)  # without a ticket, which would reserve GPUs that others may use now
            deadline += time.monotonic() - before  # closed hours are no time in which GPUs could come free
            continue
        # Nobody looked at the GPUs during closed hours, so start the window again.
        search.free_since.clear()
        with _ticket(search.folder, search.eligible, wanted.least, run) as number:
            while not closed():
                lease, why = search.look(number)
                if lease:
                    return lease
                wait(why)


@dataclass(frozen=True)
class _Search:
    """The arguments of `acquire` and the observations so far. folder: of the leases. free_since: by UUID, the
    monotonic time since when the GPU has been seen free."""

    wanted: Wanted
    inventory: Inventory
    folder: Path
    run: str
    settings: Settings
    free_since: dict[str, float] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)

    @cached_property
    def eligible(self) -> list[Gpu]:
        """The GPUs that the run may take, found once: a later reading that fails is no reason to give up."""
        return _eligible(self.wanted, visible(self.inventory.read()))

    def units(self) -> dict[str, Gpu]:
        return {gpu.uuid: gpu for gpu in visible(self.inventory.read())}

    def look(self, number: str) -> tuple[Lease | None, str]:
        """Read the GPUs once and lease those that this run may take; return (lease, reason for having none).

        number: the name of this run's ticket.
        """
        eligible, units = self.eligible, self.units()
        now, reasons, leased = time.monotonic(), [], set()
        for gpu in eligible:
            holder = find_holder(self.folder, gpu.uuid)
            if holder:
                leased.add(gpu.uuid)
                reason: str | None = f"{gpu.label}: {holder.text()}"
            elif gpu.uuid not in units:
                reason = f"{gpu.label}: NVML does not list it now"
            else:
                reason = busy_reason(units[gpu.uuid], self.settings)
            if reason:
                reasons.append(reason)
                self.free_since.pop(gpu.uuid, None)
            else:
                self.free_since.setdefault(gpu.uuid, now)
        window_s = self.settings.gpu_window_s
        ready = [g for g in eligible if now - self.free_since.get(g.uuid, now + 1) >= window_s]
        # names begin with a time of fixed width, so the smaller name is the older ticket
        ahead = {name: ticket for name, ticket in _tickets(self.folder).items() if name < number}
        reserved = self.turns.reserved(ahead, ready, leased)
        if lease := self._take([gpu for gpu in ready if gpu.uuid not in reserved]):
            return lease, ""
        for gpu in ready:
            if ticket := reserved.get(gpu.uuid):
                reasons.append(f"{gpu.label}: next is {ticket.name()}")
        return None, "; ".join(reasons)

    def _take(self, free: list[Gpu]) -> Lease | None:
        wanted = self.wanted
        if len(free) < wanted.least:
            return None
        all_of_them = not wanted.numbers and not wanted.count
        chosen = free[: wanted.at_most or None] if all_of_them else free[: wanted.least]
        lease = try_lease(self.folder, chosen, self.run)
        if lease is None:
            return None
        # Check again now that the GPUs are locked: between `look` and the lock, another run may have held and
        # released them, or another user's process may have started.
        now = self.units()
        if all(gpu.uuid in now and busy_reason(now[gpu.uuid], self.settings) is None for gpu in chosen):
            return lease
        lease.release()
        return None


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


@contextmanager
def _ticket(folder: Path, eligible: Sequence[Gpu], least: int, run: str = "") -> Iterator[str]:
    name, uuids = f"{new_number()}.ticket", frozenset(gpu.uuid for gpu in eligible)
    page = _Ticket.own(run, uuids=uuids, least=least)
    handle = make_locked(folder / name, page)
    try:
        yield name
    finally:
        (folder / name).unlink(missing_ok=True)
        os.close(handle)


def _tickets(folder: Path) -> dict[str, _Ticket]:
    """Return the tickets of living processes by name, oldest first. Another file is none, and does no
    harm."""
    names = sorted(name for name in os.listdir(folder) if _NUMBERED.fullmatch(name))
    found = {name: held_by(folder / name, _Ticket) for name in names}
    return {name: ticket for name, ticket in found.items() if ticket is not None}


def free_now(
    inventory: Inventory, settings: Settings, turns: Turns | None = None
) -> tuple[int, set[int]] | None:
    """Return how many GPUs nobody uses or waits for at this moment, and this user's processes that hold
    leases or wait; None without GPUs. turns: kept by a caller that looks again and again."""
    units = visible(inventory.read())
    if not units:
        return (0, set()) if inventory.broken else None
    folder = lease_folder(settings.lease_dir)
    tickets = _tickets(folder)
    leases = {unit.uuid: holder for unit in units if (holder := find_holder(folder, unit.uuid))}
    free = [unit for unit in units if unit.uuid not in leases and busy_reason(unit, settings) is None]
    count = len(free) - len((turns or Turns()).reserved(tickets, free, leases))
    if parse_training_hours(settings.training_hours).closed_reason(datetime.now()):
        count = 0
    return count, {who.pid for who in (*leases.values(), *tickets.values()) if who.uid == os.getuid()}
