"""What a run is told of its devices' use, and how the machine's figures are sampled."""

import re
import sys
from pathlib import Path

import pytest

from dphybrid.parallel import split_sizes
from dphybrid.tracking.system import SystemMetrics, balance_warnings
from tests import fake_nvml
from tests.commands import run_with
from tests.fake_nvml import gpu, write_state

STAGES = {"forward": 5.0, "lookup": 4.0, "data": 1.0}


@pytest.mark.parametrize(
    ("batch", "devices", "told"),
    [
        *((batch, devices, None) for batch, devices in ((30, 1), (30, 3), (30, 2), (512, 8), (31, 2))),
        (
            10,
            8,
            "3 of 8 devices got no rows of a batch of 10; set train.batch_size to a multiple of 8,",
        ),
        (30, 8, "one device got 2 rows of a batch of 30 and the others 4; .*such as 32"),
    ],
)
def test_idle_and_starved_devices_are_named_with_a_batch_that_fills_all(
    batch: int, devices: int, told: str | None
) -> None:
    rows = [
        {"number": 1, "replica": replica, "block": "region", "rows": rows, "batch_rows": batch}
        for replica, rows in enumerate(split_sizes(batch, devices))
    ]
    warnings = balance_warnings(rows, devices, {}, STAGES)
    assert len(warnings) == (told is not None)
    assert all(re.match(str(told), warning) for warning in warnings)


@pytest.mark.parametrize(
    ("busy", "told"),
    [
        ((90.0, 85.0), None),
        ((90.0, 30.0), "gpu1 worked 30% of the time and gpu0 90%"),
        ((20.0, 10.0), r"the busiest GPU, gpu0, worked 20% of the time.*lookup \(40% of the time\)"),
    ],
)
def test_gpus_that_wait_are_told_with_what_they_waited_for(busy: tuple[float, ...], told: str | None) -> None:
    system = {f"system/gpu{number}_utilization_pct": share for number, share in enumerate(busy)}
    warnings = balance_warnings([], 2, system | {"system/cpu_pct": 3.0}, STAGES)
    assert len(warnings) == (told is not None)
    assert all(re.match(str(told), warning) for warning in warnings)


def test_a_run_with_idle_devices_says_so_at_its_end_and_on_its_page(data_dir: Path) -> None:
    from mlflow.tracking import MlflowClient

    report = run_with("recipe=toy", "devices=cpu*8", "train.batch_size=10")
    assert report.warnings
    assert "3 of 8 devices got no rows" in report.text
    note = MlflowClient(report.tracking_uri).get_run(report.run_id).data.tags["mlflow.note.content"]
    assert "- **Doubts**: 3 of 8 devices got no rows" in note


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVML answers for the GPUs that the file describes."""
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    return tmp_path / "nvml.json"


def test_used_gpus_are_sampled_and_a_value_that_is_not_told_is_left_out(machine: Path) -> None:
    used = {"total_gib": 4, "free_gib": 3, "load": 73, "celsius": 61}
    first, second = gpu(0, watts=250, **used), gpu(1, hides=["power"], **used)
    write_state(machine, [first, second, gpu(2, error="GPU_IS_LOST")])
    uuids = [gpu(number)["uuid"] for number in range(3)]
    system = SystemMetrics(uuids)
    assert system.sample() == {}, "at most once a second"
    values = system.sample(apart_s=0)
    assert values["system/gpu0_power_w"] == 250
    assert values["system/gpu0_memory_mb"] == 1024
    assert values["system/gpu0_memory_pct"] == 25
    assert values["system/gpu1_utilization_pct"] == 73
    assert values["system/gpu1_temperature_c"] == 61
    assert "system/gpu1_power_w" not in values
    assert not any(name.startswith("system/gpu2") for name in values)
    assert 0 < values["system/memory_pct"] <= 100
    write_state(machine, [first | {"load": 53}, second, gpu(2, error="GPU_IS_LOST")])
    system.sample(apart_s=0)
    assert system.means["system/gpu0_utilization_pct"] == 63


def test_a_machine_without_a_driver_has_no_gpu_figures(machine: Path) -> None:
    write_state(machine, [gpu(0)], init_error="DRIVER_NOT_LOADED")
    assert not any("gpu" in name for name in SystemMetrics([gpu(0)["uuid"]]).sample(apart_s=0))
