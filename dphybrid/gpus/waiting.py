"""Wait for GPUs: first come, first served; all the GPUs that a run needs at once, or none.

A waiting run holds a numbered ticket, which is a locked file. Later runs leave the GPUs alone that an earlier
ticket can use: otherwise runs that need one GPU would overtake a run that needs three for ever. A ticket that
cannot be served now, because of other people's processes, holds nobody up.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from dphybrid.config.settings import Settings
from dphybrid.gpus.inventory import Gpu, Inventory, busy_reason, visible
from dphybrid.gpus.leases import Lease, find_holder, lease_folder, locked_page, try_lease
from dphybrid.util.errors import UserError, counted
from dphybrid.util.hours import parse_training_hours
from dphybrid.util.locks import lock
from dphybrid.util.stop import StopRequest

_BIRTH_S = 60.0
"""A hidden ticket older than this was left by a process that died while making it."""


@dataclass(frozen=True)
class Wanted:
    """Which GPUs a run needs.

    count: so many, any (0: all that are free, at least one, and at most `at_most` if that is not 0). numbers:
    exactly these, counted as torch counts the visible ones.
    """

    count: int = 0
    numbers: tuple[int, ...] = ()
    at_most: int = 0

    @property
    def least(self) -> int:
        return len(self.numbers) or max(1, self.count)


class _Ticket(BaseModel):
    """A run that waits: the GPUs that it can use, and how many of them it needs at least."""

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
    """Wait until the GPUs are free, training hours are open and nobody has leased them; lease them.

    run: the name that others see. on_wait: is called with the reason whenever it changes. stop: a request
    that ends the waiting. Raises UserError for GPUs that are not there or did not come free in time;
    Interrupted.
    """
    window_s, poll_s, timeout_s = settings.gpu_window_s, settings.gpu_poll_s, settings.gpu_wait_s
    # at least two windows: a GPU that is free now must be seen to stay so
    deadline = time.monotonic() + max(timeout_s, 2 * window_s + 2 * poll_s)
    hours, told = parse_training_hours(settings.training_hours), ""
    search = _Search(wanted, inventory, lease_folder(settings.lease_dir), run, settings)

    # This machine's clock, as people wrote the hours by it.
    def closed() -> str | None:
        return hours.closed_reason(datetime.now())

    def wait(why: str) -> None:
        nonlocal told
        if stop:
            stop.obey()
        if time.monotonic() >= deadline:
            raise UserError(
                f"{counted(wanted.least, 'GPU')} did not come free within {timeout_s:.0f} s: "
                f"{why or 'another run was faster'}; try later, raise DPHYBRID_GPU_WAIT_S, or use devices=cpu"
            )
        if why and why != told:
            told = why
            on_wait(why)
        time.sleep(poll_s)

    while True:
        eligible = _eligible(wanted, search.units())
        if shut := closed():
            wait(shut)  # without a ticket, which would keep GPUs idle that others may use now
            continue
        # closed hours are no time in which a GPU was seen to be free
        search.free_since.clear()
        with _ticket(search.folder, eligible, wanted.least) as number:
            while not closed():
                lease, why = search.look(number)
                if lease:
                    return lease
                wait(why)


@dataclass(frozen=True)
class _Search:
    """What `acquire` was given, and what its looks have found. folder: of the leases. free_since: UUID ->
    since when it has been free."""

    wanted: Wanted
    inventory: Inventory
    folder: Path
    run: str
    settings: Settings
    free_since: dict[str, float] = field(default_factory=dict)

    def units(self) -> list[Gpu]:
        return visible(self.inventory.read())

    def look(self, number: str) -> tuple[Lease | None, str]:
        """Look once, and take what is ours to take; return (lease, why not). number: of our ticket."""
        now, reasons, leased = time.monotonic(), [], set()
        eligible = _eligible(self.wanted, self.units())
        for gpu in eligible:
            holder = find_holder(self.folder, gpu.uuid)
            if holder:
                leased.add(gpu.uuid)
            if reason := f"{gpu.label}: {holder.text()}" if holder else busy_reason(gpu, self.settings):
                reasons.append(reason)
                self.free_since.pop(gpu.uuid, None)
            else:
                self.free_since.setdefault(gpu.uuid, now)
        window_s = self.settings.gpu_window_s
        ready = [g for g in eligible if now - self.free_since.get(g.uuid, now + 1) >= window_s]
        # names begin with a time of fixed width, so the smaller name is the older ticket
        ahead = [ticket for name, ticket in _tickets(self.folder).items() if name < number]
        kept = _kept_for(ahead, ready, leased)
        if lease := self._take([gpu for gpu in ready if gpu.uuid not in kept]):
            return lease, ""
        if kept:
            reasons.append(f"{len(ahead)} earlier runs wait for {len(kept)} of the GPUs")
        return None, "; ".join(reasons)

    def _take(self, mine: list[Gpu]) -> Lease | None:
        wanted = self.wanted
        if len(mine) < wanted.least:
            return None
        # CUDA gives a process one MIG device: all that are free are the whole GPUs, or one device.
        whole = [gpu for gpu in mine if not gpu.is_mig] or mine[:1]
        chosen = mine[: wanted.least] if wanted.numbers or wanted.count else whole[: wanted.at_most or None]
        lease = try_lease(self.folder, chosen, self.run)
        if lease is None:
            return None
        # Under the locks once more: between the look and the lock another run may have come and gone, or
        # somebody begun.
        now = {gpu.uuid: gpu for gpu in self.units()}
        if all(gpu.uuid in now and busy_reason(now[gpu.uuid], self.settings) is None for gpu in chosen):
            return lease
        lease.release()
        return None


def _eligible(wanted: Wanted, units: Sequence[Gpu]) -> list[Gpu]:
    if missing := [number for number in wanted.numbers if number >= len(units)]:
        there = f"{len(units)} GPUs are visible (see `dphybrid devices`)"
        raise UserError(f"devices: cuda:{missing[0]} is not here; {there}")
    chosen = [units[number] for number in wanted.numbers] or list(units)
    if wanted.least > 1 and not wanted.numbers:
        chosen = [unit for unit in chosen if not unit.is_mig]  # CUDA gives a process one MIG device
    if sum(unit.is_mig for unit in chosen) > 1 and wanted.numbers:
        raise UserError("devices: a process can use one MIG device at a time; name one")
    if len(chosen) < wanted.least:
        raise UserError(
            f"devices: {counted(wanted.least, 'GPU')} wanted, {len(chosen)} are here and visible"
            f"{' that are not split by MIG' if len(chosen) < len(units) else ''}; ask for fewer, or change "
            "CUDA_VISIBLE_DEVICES"
        )
    return chosen


def _kept_for(ahead: Sequence[_Ticket], ready: Sequence[Gpu], leased: set[str]) -> set[str]:
    """The ready GPUs that earlier tickets will take, now or once other leases end."""
    kept: set[str] = set()
    for ticket in ahead:
        usable = [gpu.uuid for gpu in ready if gpu.uuid in ticket.uuids and gpu.uuid not in kept]
        if len(usable) + len(leased & ticket.uuids) >= ticket.least:
            kept.update(usable[: ticket.least])
    return kept


@contextmanager
def _ticket(folder: Path, eligible: Sequence[Gpu], least: int) -> Iterator[str]:
    # The time since the machine's start, which setting its clock does not change; no ticket survives a start.
    name = f"{time.monotonic_ns():020d}-{os.getpid()}.ticket"
    page = _Ticket(uuids=frozenset(gpu.uuid for gpu in eligible), least=least)
    hidden = folder / f".{name}"
    handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.fchmod(handle, 0o644)
        lock(handle, wait=True)
        os.write(handle, page.model_dump_json().encode())
        hidden.rename(folder / name)  # seen only when locked
        yield name
    finally:
        for file in (hidden, folder / name):
            file.unlink(missing_ok=True)
        os.close(handle)


def _tickets(folder: Path) -> dict[str, _Ticket]:
    """The living tickets by name, oldest first; removes those of dead processes, and leaves what is no
    ticket alone."""
    found = {}
    for file in sorted(folder.glob("*.ticket")):
        # Another user's, in a sticky folder; gone meanwhile; or no ticket: that harms nobody.
        with suppress(OSError, ValidationError):
            # glob finds hidden files, too: being made, and not locked yet
            if file.name.startswith(".") and time.time() - file.lstat().st_mtime < _BIRTH_S:
                continue
            page = locked_page(file)
            if page is None:
                file.unlink(missing_ok=True)
            else:
                found[file.name] = _Ticket.model_validate_json(page)
    return found
