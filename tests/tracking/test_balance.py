"""What a run is told of its devices' use, and how the machine's figures are sampled."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dphybrid.parallel import split_sizes
from dphybrid.tracking import Tracker
from dphybrid.tracking.system import Averages, balance_warnings, nvml_reader, system_metrics
from tests.commands import run_with

STAGES = {"forward": 5.0, "lookup": 4.0, "data": 1.0}


def splits(batch: int, devices: int) -> list[dict[str, Any]]:
    return [
        {"number": 1, "replica": i, "block": "region", "rows": rows, "batch_rows": batch}
        for i, rows in enumerate(split_sizes(batch, devices))
    ]


@pytest.mark.parametrize(("batch", "devices"), [(30, 1), (30, 3), (30, 2), (512, 8), (31, 2)])
def test_an_even_split_is_not_worth_a_word(batch: int, devices: int) -> None:
    assert balance_warnings(splits(batch, devices), devices, {}, STAGES) == []


def test_idle_and_starved_devices_are_named_with_a_batch_that_fills_all() -> None:
    (idle,) = balance_warnings(splits(10, 8), 8, {}, STAGES)
    assert (
        idle
        == "3 of 8 devices got no rows of a batch of 10; a batch of a multiple of 8 rows, such as 16, fills "
        "all alike"
    )
    (starved,) = balance_warnings(splits(30, 8), 8, {}, STAGES)
    assert starved.startswith("one device got 2 rows of a batch of 30 and the others 4")
    assert "such as 32" in starved


def test_gpus_that_wait_are_told_with_what_they_waited_for() -> None:
    busy = {"system/gpu0_utilization_pct": 90.0, "system/gpu1_utilization_pct": 85.0, "system/cpu_pct": 3.0}
    assert balance_warnings([], 2, busy, STAGES) == []
    (uneven,) = balance_warnings([], 2, busy | {"system/gpu1_utilization_pct": 30.0}, STAGES)
    assert uneven.startswith("gpu1 worked 30% of the time and gpu0 90%")
    (waiting,) = balance_warnings(
        [], 2, {"system/gpu0_utilization_pct": 20.0, "system/gpu1_utilization_pct": 10.0}, STAGES
    )
    assert "the busiest GPU, gpu0, worked 20% of the time" in waiting
    assert "lookup (40% of the time)" in waiting


def test_a_run_with_idle_devices_says_so_at_its_end_and_on_its_page(data_dir: Path) -> None:
    from mlflow.tracking import MlflowClient

    report = run_with("recipe=toy", "devices=cpu*8", "train.batch_size=10")
    assert report.warnings
    assert "3 of 8 devices got no rows" in report.text
    note = MlflowClient(report.tracking_uri).get_run(report.run_id).data.tags["mlflow.note.content"]
    assert "> **Note:** 3 of 8 devices got no rows" in note


class Collecting(Tracker):
    def __init__(self) -> None:
        self.seen: list[tuple[int, Mapping[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.seen.append((step, metrics))


class FakePynvml(SimpleNamespace):
    """The part of NVML that is read, with one device that tells no power, and one that is lost."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid == "GPU-lost":
            raise self.NVMLError("GPU is lost")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=2**30, total=4 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=73)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if handle == "GPU-b":
            raise self.NVMLError("Not Supported")
        return 250_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61


def test_used_gpus_are_sampled_and_a_value_that_is_not_told_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakePynvml())
    tracker, averages = Collecting(), Averages()
    with system_metrics(tracker, time.time() - 100, ["GPU-a", "GPU-b", "GPU-lost"], averages, every_s=0.02):
        time.sleep(0.1)
    assert len(tracker.seen) >= 2
    step, values = tracker.seen[-1]
    assert step >= 100
    assert values["system/gpu0_power_w"] == 250
    assert values["system/gpu0_memory_mb"] == 1024
    assert values["system/gpu0_memory_pct"] == 25
    assert values["system/gpu1_utilization_pct"] == 73
    assert values["system/gpu1_temperature_c"] == 61
    assert "system/gpu1_power_w" not in values
    assert not any(name.startswith("system/gpu2") for name in values)
    assert 0 < values["system/memory_pct"] <= 100
    assert averages.means["system/gpu0_utilization_pct"] == 73


def test_a_clock_set_back_gives_no_negative_seconds() -> None:
    tracker = Collecting()
    with system_metrics(tracker, time.time() + 86_400):
        pass
    assert [step for step, _ in tracker.seen] == [0]


def test_a_machine_without_a_driver_has_no_gpu_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(FakePynvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", Without())
    assert nvml_reader(["GPU-a"])() == []
