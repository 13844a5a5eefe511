"""A close look at chosen steps: torch's profiler, written as a trace that opens in Perfetto
(https://ui.perfetto.dev)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from dphybrid.tracking import Tracker


class StepProfiler:
    """Profiles `steps` and puts the trace into `folder` and into the record."""

    def __init__(self, steps: range, folder: Path, tracker: Tracker) -> None:
        self._steps, self._folder, self._tracker = steps, folder, tracker
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Step `step` (counted from 1) is about to run."""
        if self._running is None and step in self._steps:
            activities = [ProfilerActivity.CPU] + (
                [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            )
            self._running = profile(
                activities=activities,
                record_shapes=True,
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self._running.start()

    def after(self, step: int) -> None:
        """Step `step` has run."""
        if self._running is not None and step + 1 not in self._steps:
            self.stop()

    def stop(self) -> None:
        """End the profile, if there is one, and write its trace."""
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        path = self._folder / f"trace-steps-{self._steps[0]}-{self._steps[-1]}.json.gz"
        running.export_chrome_trace(str(path))
        print(
            f"Profile of steps {self._steps[0]} to {self._steps[-1]}: {path} (opens in "
            "https://ui.perfetto.dev)",
            flush=True,
        )
        self._tracker.log_file(path, "profile")


@contextmanager
def profiled_steps(steps: range, folder: Path, tracker: Tracker) -> Iterator[StepProfiler]:
    """Yield a profiler that is told of each step; what it has is written at the end of the block at the
    latest."""
    profiler = StepProfiler(steps, folder, tracker)
    try:
        yield profiler
    finally:
        profiler.stop()
