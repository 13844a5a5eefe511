"""Waiting for GPUs: first come, first served, several at once or none, with a reason that people understand.

Whoever waits holds a numbered ticket, a locked file. GPUs that an earlier ticket can use are left to it, so
that a run that wants three is not overtaken for ever by runs that want one; a ticket whose wish other
people's processes make impossible for now holds nobody up.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from dphybrid.gpus.inventory import Gpu, Inventory, Policy, busy_reason, visible
from dphybrid.gpus.leases import Lease, find_holder, locked_page, try_lease, user_name
from dphybrid.util.errors import UserError
from dphybrid.util.locks import lock
from dphybrid.util.shared_files import OddFileError
from dphybrid.util.text import printable

_BIRTH_S = 60.0
"""A hidden ticket older than this was left by a process that died while making it."""


class LeaseTimeoutError(UserError):
    """The GPUs did not come free within the time limit."""


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
    folder: Path,
    *,
    run: str,
    policy: Policy = Policy(),  # noqa: B008 - frozen
    names: str | None = None,
    timeout_s: float = 0.0,
    poll_s: float = 1.0,
    on_wait: Callable[[str], None] = lambda reason: None,
    closed: Callable[[], str | None] = lambda: None,
    on_look: Callable[[], None] = lambda: None,
) -> Lease:
    """Wait until the GPUs are free by `policy` and leased to no one, and lease them.

    folder: of `lease_folder`. run: shown to others. names: CUDA_VISIBLE_DEVICES. timeout_s counts from the
    call; 0 still allows for the policy's window. on_wait is told why, when the reason changes. closed: why
    nothing may start now (outside training hours), or None. on_look is called before each look, and ends the
    waiting by raising. Raises UserError for GPUs that are not there, LeaseTimeoutError with the reasons.
    """
    deadline = time.monotonic() + max(timeout_s, 2 * policy.window_s + 2 * poll_s)
    told = ""
    odd: set[str] = set()

    def note(what: str) -> None:
        if what not in odd:
            odd.add(what)
            print(f"Note: ignored in the folder of leases: {what}", file=sys.stderr, flush=True)

    def wait(why: str) -> None:
        nonlocal told
        on_look()
        if time.monotonic() >= deadline:
            raise LeaseTimeoutError(
                f"{_text(wanted)} did not come free within {timeout_s:.0f} s: "
                f"{why or 'another run was faster'}; try later, raise DPHYBRID_GPU_WAIT_S, or use devices=cpu"
            )
        if why and why != told:
            told = why
            on_wait(why)
        time.sleep(poll_s)

    while True:
        eligible = _eligible(wanted, visible(inventory.read(), names))
        if shut := closed():
            wait(shut)  # without a ticket, which would keep GPUs idle that others may use now
            continue
        free_since: dict[str, float] = {}
        with _ticket(folder, eligible, wanted.least, run) as number:
            while not closed():
                lease, why = _try(wanted, inventory, folder, run, policy, names, number, free_since, note)
                if lease:
                    return lease
                wait(why)


def _try(
    wanted: Wanted,
    inventory: Inventory,
    folder: Path,
    run: str,
    policy: Policy,
    names: str | None,
    number: str,
    free_since: dict[str, float],
    note: Callable[[str], None],
) -> tuple[Lease | None, str]:
    """Look once, and take what is ours to take; return (lease, why not). free_since: UUID -> since when it
    has been free, kept up to date. note: called with a message for other files
    named as tickets."""
    now, reasons, leased = time.monotonic(), [], set()
    eligible = _eligible(wanted, visible(inventory.read(), names))
    for gpu in eligible:
        holder = find_holder(folder, gpu.uuid)
        if holder:
            leased.add(gpu.uuid)
        if reason := f"{gpu.label}: {holder.text()}" if holder else busy_reason(gpu, policy):
            reasons.append(reason)
            free_since.pop(gpu.uuid, None)
        else:
            free_since.setdefault(gpu.uuid, now)
    ready = [gpu for gpu in eligible if now - free_since.get(gpu.uuid, now + 1) >= policy.window_s]
    ahead = [ticket for name, ticket in _tickets(folder, note).items() if name < number]
    kept = _kept_for(ahead, ready, leased)
    if lease := _take(
        wanted, [gpu for gpu in ready if gpu.uuid not in kept], inventory, folder, run, policy, names
    ):
        return lease, ""
    if kept:
        reasons.append(f"{len(ahead)} earlier runs wait for {len(kept)} of the GPUs")
    return None, "; ".join(reasons)


def _text(wanted: Wanted) -> str:
    return f"{wanted.least} GPU{'s' * (wanted.least > 1)}"


def _eligible(wanted: Wanted, units: Sequence[Gpu]) -> list[Gpu]:
    if missing := [number for number in wanted.numbers if number >= len(units)]:
        raise UserError(
            f"devices: cuda:{missing[0]} is not here; {len(units)} GPUs are visible (see `dphybrid devices`)"
        )
    chosen = [units[number] for number in wanted.numbers] or list(units)
    if wanted.least > 1 and not wanted.numbers:
        chosen = [unit for unit in chosen if not unit.is_mig]  # CUDA gives a process one MIG device
    if sum(unit.is_mig for unit in chosen) > 1 and wanted.numbers:
        raise UserError("devices: a process can use one MIG device at a time; name one")
    if len(chosen) < wanted.least:
        raise UserError(
            f"devices: {_text(wanted)} wanted, {len(chosen)} are here and visible"
            f"{' that are not split by MIG' if len(chosen) < len(units) else ''}; ask for fewer, or change "
            "CUDA_VISIBLE_DEVICES"
        )
    return chosen


def _take(
    wanted: Wanted,
    mine: list[Gpu],
    inventory: Inventory,
    folder: Path,
    run: str,
    policy: Policy,
    names: str | None,
) -> Lease | None:
    if len(mine) < wanted.least:
        return None
    whole = [gpu for gpu in mine if not gpu.is_mig] or mine[:1]
    chosen = mine[: wanted.least] if wanted.numbers or wanted.count else whole[: wanted.at_most or None]
    lease = try_lease(folder, chosen, run)
    if lease is None:
        return None
    # Under the locks once more: between the look and the lock another run may have come and gone, or somebody
    # begun.
    now = {gpu.uuid: gpu for gpu in visible(inventory.read(), names)}
    if all(gpu.uuid in now and busy_reason(now[gpu.uuid], policy) is None for gpu in chosen):
        return lease
    lease.release()
    return None


def _kept_for(ahead: Sequence[_Ticket], ready: Sequence[Gpu], leased: set[str]) -> set[str]:
    """The ready GPUs that earlier tickets will take, now or once other leases end."""
    kept: set[str] = set()
    for ticket in ahead:
        usable = [gpu.uuid for gpu in ready if gpu.uuid in ticket.uuids and gpu.uuid not in kept]
        if len(usable) + len(leased & ticket.uuids) >= ticket.least:
            kept.update(usable[: ticket.least])
    return kept


@contextmanager
def _ticket(folder: Path, eligible: Sequence[Gpu], least: int, run: str) -> Iterator[str]:
    name = f"{time.time_ns():020d}-{os.getpid()}.ticket"
    page = {
        "uuids": [gpu.uuid for gpu in eligible],
        "least": least,
        "run": run,
        "user": user_name(),
        "pid": os.getpid(),
    }
    hidden = folder / f".{name}"
    handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.fchmod(handle, 0o644)
        lock(handle, wait=True)
        os.write(handle, json.dumps(page).encode())
        hidden.rename(folder / name)  # seen only when locked
        yield name
    finally:
        for file in (hidden, folder / name):
            file.unlink(missing_ok=True)
        os.close(handle)


def _age_s(file: Path) -> float:
    try:
        return time.time() - file.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _tickets(folder: Path, note: Callable[[str], None] = lambda what: None) -> dict[str, _Ticket]:
    """The living tickets by name, oldest first; removes those of dead processes, notes other files
    and leaves them alone."""
    found = {}
    for file in sorted(folder.glob("*.ticket")):
        # glob finds hidden files, too: being made, and not locked yet
        if file.name.startswith(".") and _age_s(file) < _BIRTH_S:
            continue
        try:
            page = locked_page(file)
            if page is None:
                file.unlink(missing_ok=True)
            else:
                found[file.name] = _Ticket.model_validate_json(page)
        except OddFileError as error:
            note(printable(str(error) if str(file) in str(error) else f"{file}: {error}"))
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            note(printable(f"{file}: is not a ticket ({why[:100]})"))
        except PermissionError:
            continue  # another user's, in a sticky folder: it harms nobody
    return found
