"""Timed stages. The code that does the work says `with stage("scatter"):`; the time goes to the clock that
runs in this thread, if there is one."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol


class Clock(Protocol):
    """What adds up times, such as `dphybrid.training.clock.StageClock`."""

    def stage(self, name: str, /) -> AbstractContextManager[object]:
        """Return a context manager that adds the block's time to `name`."""
        ...


class _Local(threading.local):
    clock: Clock | None = None


_local, _UNTIMED = _Local(), nullcontext()


def stage(name: str) -> AbstractContextManager[object]:
    """Return a context manager that adds the block's time to stage `name`, or does nothing without a clock.
    An inner stage's time does not count in the outer one."""
    return _UNTIMED if _local.clock is None else _local.clock.stage(name)


@contextmanager
def timed(clock: Clock | None) -> Iterator[None]:
    """While the block runs, this thread's stages count in `clock`; None: they are not timed."""
    before, _local.clock = _local.clock, clock
    try:
        yield
    finally:
        _local.clock = before
