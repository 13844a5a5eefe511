"""A training that is asked to stop after a step, as tests of what stops and goes on want it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dphybrid.training.split_log import SplitLog
from dphybrid.util.stop import StopRequest


@contextmanager
def stopping_after(step: int) -> Iterator[StopRequest]:
    """Yield a request to give to a training, which is made after this step of it."""
    stop, after_step = StopRequest(), SplitLog.after_step

    def asking(self: SplitLog, now: int) -> list[str]:
        if now == step:
            stop.ask("a test")
        return after_step(self, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitLog, "after_step", asking)
        yield stop
