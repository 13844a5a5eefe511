"""The clock of stages: nested stages, marks on a device, percentiles, and how much of a run it explains."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dphybrid.training.clock import WARM_UP_STEPS, StageClock, StepTimes
from dphybrid.training.display import Display
from tests.commands import run_with


class FakeDevice:
    """A stream whose time the test sets."""

    ms, waited = 0.0, 0

    def event(self) -> SimpleNamespace:
        def synchronize() -> None:
            self.waited += 1

        mark = SimpleNamespace(synchronize=synchronize, elapsed_time=lambda end: end.at - mark.at)
        mark.record = lambda: setattr(mark, "at", self.ms)
        return mark


def test_the_outer_stage_stands_still_while_the_inner_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("dphybrid.training.clock.time.perf_counter", lambda: now[0])
    clock = StageClock()

    def fails() -> None:
        with clock.stage("outer"):
            now[0] += 2
            with clock.stage("inner"):
                now[0] += 3
                raise ValueError

    with pytest.raises(ValueError):
        fails()
    now[0] += 100  # belongs to no stage
    with clock.stage("outer"):
        now[0] += 1
    assert clock.totals == {"outer": 3.0, "inner": 3.0}


def test_stages_of_a_device_are_measured_by_its_marks() -> None:
    device = FakeDevice()
    clock = StageClock(device.event)
    with clock.stage("step"):
        device.ms += 1
        with clock.stage("forward"):
            device.ms += 10
        with clock.stage("backward"):
            device.ms += 20
        device.ms += 2
    device.ms += 100  # belongs to no stage
    assert device.waited == 0
    assert clock.totals == pytest.approx({"step": 0.003, "forward": 0.010, "backward": 0.020})
    assert device.waited == 1
    with clock.stage("forward"):
        device.ms += 5
    assert clock.window() == pytest.approx({"step": 0.003, "forward": 0.015, "backward": 0.020})
    assert clock.window() == {}
    device.waited = 0
    for _ in range(10_000):
        with clock.stage("forward"):
            device.ms += 1
    assert 1 <= device.waited <= 10
    assert clock.totals["forward"] == pytest.approx(10.015)


def test_steps_of_the_warm_up_and_short_batches_stay_apart() -> None:
    times = StepTimes()
    assert times.summary() == {}
    times.ms = [4.0, 5.0]  # too few for a warm-up
    assert times.summary() == {"p50": 4.0, "p95": 5.0, "mean": 4.5, "steps": 2.0}
    times.ms = [100.0] * WARM_UP_STEPS + [1.0, 2.0, 3.0]
    summary = times.summary()
    assert summary == {"p50": 2.0, "p95": 3.0, "mean": 2.0, "warm_up": 100.0, "steps": 3.0}
    times.begin()
    times.end(full=False)
    assert len(times.ms) == WARM_UP_STEPS + 3


def test_speed_counts_the_rows_that_a_batch_has(
    data_dir: Path, unrecorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training rows are one batch, smaller than train.batch_size."""
    lines: list[str] = []
    monkeypatch.setattr(Display, "metrics_line", lambda _, line: lines.append(line))
    values = ("train.epochs=2", "train.batch_size=1000000", "train.log_every=1")
    report = run_with("recipe=hybrid", "devices=cpu", *values)
    assert report.step_ms["steps"] == 2
    for line in lines:
        ms, speed = re.findall(r"([\d.]+) ms a step, (\d+) samples/s", line)[0]
        assert float(ms) * float(speed) / 1000 == pytest.approx(10_000, rel=0.1)
    assert len(lines) == 2


def test_a_report_and_a_profile_name_the_stages(data_dir: Path, unrecorded: None) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        report = run_with("recipe=hybrid", "devices=cpu*3", "train.epochs=1", "train.batch_size=2000")
    named = {"data", "lookup", "scatter", "replicate", "forward", "gather", "loss", "backward", "clip"}
    assert named | {"row_update", "dense_update", "evaluate", "checkpoint", "log"} <= set(report.stages)
    assert report.step_ms["p50"] <= report.step_ms["p95"]
    labels = {event.name.removeprefix("dphybrid/") for event in profile.events() or ()}
    assert labels >= named, "the trace reads like the report"
