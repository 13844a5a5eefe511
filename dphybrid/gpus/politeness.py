"""Giving way: a thread watches the GPUs of a training and asks it to stop when their owner needs them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import NoReturn

from dphybrid.config.settings import Settings
from dphybrid.gpus import Gpu, Policy, asked_by
from dphybrid.gpus.inventory import GIB, describe_process, foreign_processes
from dphybrid.gpus.leasing import LeasedDevices
from dphybrid.util.hours import parse_training_hours
from dphybrid.util.stop import Interrupted, StopRequest
from dphybrid.util.watching import watching

_SQUEEZE_SHARE = 0.02
"""Share of a GPU's memory below which, beside another process, what is free does not last: one of the two
will fail."""


@contextmanager
def giving_way(devices: LeasedDevices, settings: Settings, stop: StopRequest) -> Iterator[None]:
    """While the block runs, ask its run to stop, and to be queued again, when `reason_to_yield` finds a
    reason.

    Twice in a row: processes that only look at a GPU come and go.
    """
    if devices.lease is None:
        yield
        return
    before: str | None = None

    def look() -> bool:
        nonlocal before
        reason, last = reason_to_yield(devices, settings, datetime.now()), before
        before = reason
        if not (reason and last):
            return False
        stop.ask(reason, requeue=True)
        return True

    with watching(look, settings.gpu_poll_s, "dphybrid-giving-way"):
        yield


def reason_to_yield(devices: LeasedDevices, settings: Settings, now: datetime) -> str | None:
    """Return why the GPUs should be given back at this moment, or None.

    The end of training hours and a lost lease count whatever `yield_to_others` says. ask: a request, or
    memory that runs out beside another process.
    always: any other process, too.
    """
    if devices.lease is None or devices.inventory is None:
        return None
    if closed := parse_training_hours(settings.training_hours).closed_reason(now):
        return f"the end of training hours ({closed})"
    if lost := devices.lease.lost():
        return lost
    if settings.yield_to_others == "never":
        return None
    if asked := asked_by(devices.lease):
        return asked
    units = {unit.uuid: unit for unit in devices.inventory.read()}
    for gpu in devices.lease.gpus:
        if gpu.uuid in units and (reason := _crowded(units[gpu.uuid], settings)):
            return reason
    return None


def _crowded(gpu: Gpu, settings: Settings) -> str | None:
    # Processes of other containers have numbers that could be our own, so only those seen here count.
    others = [process for process in foreign_processes(gpu, Policy.of(settings)) if process.owner]
    if not others:
        return None
    if settings.yield_to_others == "always":
        return f"{gpu.label}: {describe_process(others[0])}"
    if gpu.free_bytes < _SQUEEZE_SHARE * gpu.total_bytes:
        return f"{gpu.label}: {gpu.free_bytes / GIB:.1f} GiB left beside {describe_process(others[0])}"
    return None


def go_on_later(
    interruption: Interrupted, settings: Settings, before: Callable[[], None] = lambda: None
) -> NoReturn:
    """Go on with an interrupted run in a new process image, after a pause: with nothing left on the GPUs
    meanwhile.

    before: what to end first. The same command is run again, with `--resume RUN` once the run had begun.
    """
    print(
        f"{interruption}\nGiving way; asks for GPUs again in {settings.requeue_after_s:.0f} s (Ctrl-C ends "
        "it)",
        flush=True,
    )
    before()
    code = "import sys, time, os; time.sleep(float(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
    again = [
        sys.executable,
        *sys.orig_argv[1:],
        *(["--resume", interruption.run] if interruption.run else []),
    ]
    # exec, not a pause here: CUDA gives its memory back only when the process image is gone
    os.execv(  # noqa: S606 - this program again, with its own arguments
        sys.executable, [sys.executable, "-c", code, str(settings.requeue_after_s), *again]
    )
