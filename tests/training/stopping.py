"""Stop a training after a given step, for tests of stopping and resuming."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dphybrid.run.pages import Report
from dphybrid.training.split_log import SplitLog
from dphybrid.util.stop import Interrupted, StopRequest
from tests.commands import run_with


@contextmanager
def stopping_after(step: int) -> Iterator[StopRequest]:
    """Yield a StopRequest to pass to a training; it asks for the stop after this step."""
    stop, after_step = StopRequest(), SplitLog.after_step

    def asking(self: SplitLog, now: int, rows: int) -> list[str]:
        if now == step:
            stop.ask("a test")
        return after_step(self, now, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitLog, "after_step", asking)
        yield stop


def stopped_and_resumed(*values: str, at: int) -> Report:
    """Train the run `broken` until step `at`, then resume it from its checkpoint."""
    with stopping_after(at) as stop, pytest.raises(Interrupted, match=f"step-{at:06d}"):
        run_with(*values, run_name="broken", stop=stop)
    report = run_with(*values, resume="broken")
    assert report.run_name == "broken"
    return report
