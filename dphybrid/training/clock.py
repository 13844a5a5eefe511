"""Where a step's time goes: exclusive seconds a stage, a nested stage's time counted once; and how long each
step took."""

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from dphybrid.embedding import find_tables
from dphybrid.parallel import find_data_parallel
from dphybrid.util.compiling import labelled, profiler_looks_on

NOT_A_STEP = ("evaluate", "checkpoint", "log", "profile", "callbacks")
"""Stages that happen between steps and do not count as their time."""

WARM_UP_STEPS = 5
"""First steps of an attempt, timed apart: they make caches, threads and kernels."""

_RECENT_STEPS = 1000
"""So many steps make the running median."""


class StageClock:
    """Adds up seconds by stage. Stages nest: while the inner one runs, the outer one stands still.

    new_event: for a GPU, makes events on its stream. They are only marked while training and read now and
    then, so that the host never waits for the device because it is being timed; a stage then lasts from the
    moment the device comes to it to the moment the device comes to the next one.
    """

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
        """Stage -> seconds since the start."""
        self._read_marks()
        return dict(self._totals)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return all seconds, and those at the last call of `window`, fit for JSON."""
        return {"totals": self.totals, "window": self._window}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from an earlier process's seconds; on a clock that has not run yet."""
        self._totals, self._window = dict(state["totals"]), dict(state["window"])

    def _switch(self, following: str | None) -> None:
        """End the stage that runs, and begin `following`."""
        if self._new_event is not None:
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
        # The last mark begins the stage that still runs.
        del self._marks[:-1]

    def stage(self, name: str) -> "_Stage":
        """Return a context manager that counts the block's time under `name`."""
        return self._stages.get(name) or self._stages.setdefault(name, _Stage(self, name))

    def window(self) -> dict[str, float]:
        """Return the seconds by stage since the last call."""
        now = self.totals
        grown = {stage: seconds - self._window.get(stage, 0.0) for stage, seconds in now.items()}
        self._window = now
        return {stage: seconds for stage, seconds in grown.items() if seconds > 0}


class _Stage:
    """One stage of a clock. A class, because steps of a millisecond enter a dozen of them: contextlib's would
    cost several times as much."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: StageClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        clock, label = self._clock, None
        clock._switch(self._name)
        # Asked each time: a profile begins and ends between steps, and its labels cost microseconds.
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
    """How long each step took on the host's clock, without what happens between steps. A short last batch is
    left out. Keeps 8 bytes a step."""

    def __init__(self) -> None:
        self.ms = array("d")
        self.count = 0
        self._since = time.perf_counter()
        self._told = 0

    def begin(self) -> None:
        """Start the next step here."""
        self._since = time.perf_counter()

    def end(self, full: bool) -> None:
        """End the step. full: its batch had the full size."""
        self.count += 1
        if full:
            self.ms.append(1e3 * (time.perf_counter() - self._since))

    def window(self) -> Mapping[str, float]:
        """Return p50 and p95 (ms) of the steps since the last call, or nothing."""
        fresh, self._told = self.ms[self._told :], len(self.ms)
        return {"p50": _percentile(fresh, 0.5), "p95": _percentile(fresh, 0.95)} if fresh else {}

    def recent(self) -> float | None:
        """Return the median (ms) of the newest steps, None without any."""
        return _percentile(self.ms[-_RECENT_STEPS:], 0.5) if self.ms else None

    def summary(self) -> dict[str, float]:
        """Return p50, p95, mean (ms) and count of all steps after the warm-up, and the warm-up's mean. Empty
        without steps."""
        warm, steady = self.ms[:WARM_UP_STEPS], self.ms[WARM_UP_STEPS:]
        if not steady:  # too short a run to tell them apart
            warm, steady = self.ms[:0], self.ms
        if not steady:
            return {}
        p50, p95 = (_percentile(steady, share) for share in (0.5, 0.95))
        figures = {"p50": p50, "p95": p95, "mean": statistics.fmean(steady)}
        return figures | ({"warm_up": statistics.fmean(warm)} if warm else {}) | {"steps": float(len(steady))}


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))


@contextmanager
def timed_parts(clock: StageClock, model: nn.Module) -> Iterator[None]:
    """While the block runs, count table lookups of `model` as stage `lookup`, and what its data-parallel
    blocks do around their modules as `scatter`, `replicate`, `host_to_device` and `gather`.

    Only in training mode: an evaluation is one stage.
    """
    blocks, lookup = list(find_data_parallel(model).values()), clock.stage("lookup")
    handles: list[Any] = []
    for table in find_tables(model).values():
        handles += [
            table.register_forward_pre_hook(lambda table, _: lookup.__enter__() if table.training else None),
            table.register_forward_hook(
                lambda table, *_: lookup.__exit__() if table.training else None, always_call=True
            ),
        ]
    for block in blocks:
        block.stage = clock.stage
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block in blocks:
            block.stage = None
