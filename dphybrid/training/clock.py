"""Step timing: exclusive seconds per stage (a nested stage's time is not counted in the outer one), and the
duration of each step. `util.stages` has the `stage` that the timed code enters."""

import math
import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from dphybrid.util.compiling import labelled, profiler_looks_on

NOT_A_STEP = ("evaluate", "checkpoint", "log", "callbacks")
"""Stages that run between steps and are not part of the step time."""

WARM_UP_STEPS = 5
"""Steps at the start of a process that are reported separately: they fill caches, start threads and build
kernels."""

_RECENT_STEPS = 1000
"""Window of the running median, in steps."""


class StageClock:
    """Adds up seconds by stage. Stages nest: the outer one is paused while the inner one runs.

    new_event: creates CUDA events, for work on a GPU. Training only records them; they are read rarely, so
    that timing does not make the host wait for the device. A stage then lasts from the moment the device
    reaches it until the device reaches the next one.
    """

    # Events kept before they are read: bounds their number, and a read synchronises with the device.
    _READ_AFTER = 4096

    def __init__(self, new_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        self._new_event = new_event
        self._totals: dict[str, float] = {}
        self._stack: list[tuple[str, AbstractContextManager[object] | None]] = []
        self._running: str | None = None
        self._since = 0.0
        self._marks: list[tuple[str | None, torch.cuda.Event]] = []
        self._window: dict[str, float] = {}
        self._stages: dict[str, _Stage] = {}

    @classmethod
    def of(cls, device: torch.device) -> "StageClock":
        """Return a clock for work on `device`."""
        return cls((lambda: torch.cuda.Event(enable_timing=True)) if device.type == "cuda" else None)

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by stage since the start of the run."""
        self._read_marks()
        return dict(self._totals)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the totals now and at the last call of `window`, fit for JSON."""
        return {"totals": self.totals, "window": self._window}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from the totals of an earlier process. Only for a clock that has not run yet."""
        self._totals, self._window = dict(state["totals"]), dict(state["window"])

    def _switch(self, following: str | None) -> None:
        """End the running stage and start `following`."""
        if self._new_event is not None:
            # No clock is read here: kernels run asynchronously, and only the device knows when.
            event = self._new_event()
            event.record()
            self._marks.append((following, event))
            if len(self._marks) > self._READ_AFTER:
                self._read_marks()
            return
        now = time.perf_counter()
        if (ended := self._running) is not None:
            self._totals[ended] = self._totals.get(ended, 0.0) + now - self._since
        self._running, self._since = following, now

    def _read_marks(self) -> None:
        if len(self._marks) < 2:
            return
        self._marks[-1][1].synchronize()
        for (stage, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if stage is not None:
                self._totals[stage] = self._totals.get(stage, 0.0) + 1e-3 * begin.elapsed_time(end)
        # Keep the last mark, which is the start of the stage that still runs.
        del self._marks[:-1]

    def stage(self, name: str) -> "_Stage":
        """Return a context manager that adds the block's time to `name`."""
        # One object for each name, even when entered recursively: the open stages are on the clock's stack.
        return self._stages.get(name) or self._stages.setdefault(name, _Stage(self, name))

    def window(self) -> dict[str, float]:
        """Return the seconds by stage since the last call, without stages that did not run."""
        now = self.totals
        grown = {stage: seconds - self._window.get(stage, 0.0) for stage, seconds in now.items()}
        self._window = now
        return {stage: seconds for stage, seconds in grown.items() if seconds > 0}


class _Stage:
    """One stage of a clock. A class, because a step of a millisecond enters a dozen stages, and contextlib's
    generators cost several times as much."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: StageClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        clock, label = self._clock, None
        clock._switch(self._name)
        # Checked each time, as a profile may start between steps; labels without one would cost microseconds.
        if profiler_looks_on():
            label = labelled(self._name)
            label.__enter__()
        clock._stack.append((self._name, label))

    def __exit__(self, *_: object) -> None:
        clock = self._clock
        label = clock._stack.pop()[1]
        if label is not None:
            label.__exit__(None, None, None)
        clock._switch(clock._stack[-1][0] if clock._stack else None)


class StepTimes:
    """Duration of each step on the host's clock, without the work between steps. Short last batches are left
    out. Keeps 8 bytes for each step."""

    def __init__(self) -> None:
        self.ms = array("d")
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Start timing the next step."""
        self._since = time.perf_counter()

    def end(self, full: bool) -> None:
        """End the step. full: whether its batch had the full size."""
        if full:
            self.ms.append(1e3 * (time.perf_counter() - self._since))

    def recent(self) -> float | None:
        """Return the median (ms) of the newest steps, or None before the first full batch."""
        return _percentile(self.ms[-_RECENT_STEPS:], 0.5) if self.ms else None

    def summary(self) -> dict[str, float]:
        """Return p50, p95, mean (ms) and count of the steps after the warm-up, and the warm-up's mean. Empty
        without steps."""
        warm, steady = self.ms[:WARM_UP_STEPS], self.ms[WARM_UP_STEPS:]
        if not steady:  # the run was shorter than the warm-up: report all of its steps
            warm, steady = self.ms[:0], self.ms
        if not steady:
            return {}
        p50, p95 = (_percentile(steady, share) for share in (0.5, 0.95))
        figures = {"p50": p50, "p95": p95, "mean": statistics.fmean(steady)}
        return figures | ({"warm_up": statistics.fmean(warm)} if warm else {}) | {"steps": float(len(steady))}


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed: a time that was measured,
    not an average of two neighbours."""
    # Not numpy's quantile, which takes 0.1 ms for 20 values.
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
