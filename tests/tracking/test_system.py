"""How the machine's figures are sampled."""

import sys
from pathlib import Path

import pytest

from dphybrid.tracking.system import SystemMetrics
from tests import fake_nvml
from tests.fake_nvml import gpu, write_state


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVML answers for the GPUs that the file describes."""
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    return tmp_path / "nvml.json"


def test_used_gpus_are_sampled_without_values_they_do_not_report(machine: Path) -> None:
    used = {"total_gib": 4, "free_gib": 3, "load": 73}
    first, second = gpu(0, **used), gpu(1, hides=["load"], **used)
    write_state(machine, [first, second, gpu(2, error="GPU_IS_LOST")])
    uuids = [gpu(number)["uuid"] for number in range(3)]
    system = SystemMetrics(uuids)
    assert system.sample() == {}, "at most once a second"
    values = system.sample(apart_s=0)
    assert values["system/gpu0_memory_mb"] == 1024
    assert values["system/gpu0_utilization_pct"] == 73
    assert "system/gpu1_utilization_pct" not in values
    assert not any(name.startswith("system/gpu2") for name in values)
    assert 0 < values["system/memory_pct"] <= 100


def test_a_machine_without_a_driver_has_no_gpu_figures(machine: Path) -> None:
    write_state(machine, [gpu(0)], init_error="DRIVER_NOT_LOADED")
    assert not any("gpu" in name for name in SystemMetrics([gpu(0)["uuid"]]).sample(apart_s=0))
