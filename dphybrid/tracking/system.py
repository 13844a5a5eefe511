"""The machine's load during a training (processor, memory and each used GPU), and warnings of devices that
were used badly."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from dphybrid.util.limited import NVML_LIMIT_S, Limited

_MIB = 2**20

_UNEVEN = 1.25
"""A split is called uneven if its largest share is at least so many times its smallest."""

_BUSY_PCT = 50.0
"""A GPU below this mean utilization waits more than it works."""

_DEVICE_STAGES = ("forward", "backward", "replicate", "scatter", "gather", "loss", "dense_update")

_GpuReading = dict[str, float]
"""utilization_pct, memory_mb, memory_pct, power_w, temperature_c: those that the device reports."""


class SystemMetrics:
    """Samples `system/...` metrics of this machine. gpus: UUIDs of the GPUs that the run uses.

    Attributes:
        means: The means of the values so far, by name.
    """

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self.means: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._gpus, self._own = _nvml_reader(gpus), psutil.Process()
        # These calls return the load since the call before; the first one returns 0.
        psutil.cpu_percent()
        self._own.cpu_percent()
        self._last = time.monotonic()

    def sample(self, apart_s: float = 1.0) -> dict[str, float]:
        """Return the present values; none if the last ones are less than `apart_s` seconds old."""
        if time.monotonic() - self._last < apart_s:
            return {}
        self._last = time.monotonic()
        values = {
            "system/cpu_pct": psutil.cpu_percent(),
            "system/process_cpu_pct": self._own.cpu_percent(),
            "system/memory_pct": psutil.virtual_memory().percent,
            "system/process_rss_mb": self._own.memory_info().rss / _MIB,
        }
        for index, reading in enumerate(self._gpus()):
            values |= {f"system/gpu{index}_{name}": value for name, value in reading.items()}
        self._counts.update(values.keys())
        for name, value in values.items():
            mean = self.means.get(name, 0.0)
            self.means[name] = mean + (value - mean) / self._counts[name]
        return values


def _nvml_reader(gpus: Sequence[str]) -> Callable[[], list[_GpuReading]]:
    """Return a function that reads the GPUs with these UUIDs through NVML, without the values that a device
    does not report."""
    if not gpus:
        return list
    # Imported here, because a machine without GPUs needs no NVML.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver here
        return list

    ask: dict[str, Callable[[Any], float]] = {
        "memory_mb": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / _MIB,
        "memory_pct": lambda gpu: 100 * (memory := pynvml.nvmlDeviceGetMemoryInfo(gpu)).used / memory.total,
        "utilization_pct": lambda gpu: float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "temperature_c": lambda gpu: float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    }

    def read_one(uuid: str) -> _GpuReading:
        reading: _GpuReading = {}
        for name, question in ask.items():
            with suppress(pynvml.NVMLError):
                reading[name] = question(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return reading

    read = Limited(lambda: [read_one(uuid) for uuid in gpus], NVML_LIMIT_S)

    def read_if_it_answers() -> list[_GpuReading]:
        with suppress(TimeoutError):
            return read()
        return []

    return read_if_it_answers


def balance_warnings(
    splits: Sequence[Mapping[str, object]],
    num_devices: int,
    system: Mapping[str, float],
    stages: Mapping[str, float],
) -> list[str]:
    """Return a sentence with a remedy for each device that was used badly.

    Args:
        splits: Rows of the split table.
        system: Means of the `system/...` metrics.
        stages: Stage -> seconds.
    """
    return _of_the_split(splits, num_devices) + _of_the_gpus(system, stages)


def _of_the_split(splits: Sequence[Mapping[str, Any]], num_devices: int) -> list[str]:
    # Split 1 is that of the first batch, which is full. Its first block stands for all.
    full = [row for row in splits if row["number"] == 1]
    first = [row for row in full if row["block"] == full[0]["block"]]
    if num_devices < 2 or not first:
        return []
    rows, batch = [int(row["rows"]) for row in first], int(first[0]["batch_rows"])
    remedy = (
        f"set train.batch_size to a multiple of {num_devices}, such as "
        f"{-(-batch // num_devices) * num_devices}"
    )
    if len(rows) < num_devices:
        return [
            f"{num_devices - len(rows)} of {num_devices} devices got no rows of a batch of {batch}; {remedy}"
        ]
    if max(rows) >= _UNEVEN * min(rows):
        return [f"one device got {min(rows)} rows of a batch of {batch} and the others {max(rows)}; {remedy}"]
    return []


def _of_the_gpus(system: Mapping[str, float], stages: Mapping[str, float]) -> list[str]:
    suffix = "_utilization_pct"
    busy = {
        name.removeprefix("system/").removesuffix(suffix): value
        for name, value in system.items()
        if name.endswith(suffix)
    }
    if not busy:
        return []
    most, least = max(busy, key=busy.__getitem__), min(busy, key=busy.__getitem__)
    if busy[most] < _BUSY_PCT:
        waited = {stage: seconds for stage, seconds in stages.items() if stage not in _DEVICE_STAGES}
        words = f"the busiest GPU, {most}, worked {busy[most]:.0f}% of the time"
        if waited:
            stage = max(waited, key=waited.__getitem__)
            words += (
                f"; the largest stage outside the GPUs is {stage} "
                f"({waited[stage] / sum(stages.values()):.0%} of the time)"
            )
        return [f"{words}; use a larger batch or fewer GPUs"]
    if len(busy) > 1 and busy[least] < _BUSY_PCT / 100 * busy[most]:
        return [
            f"{least} worked {busy[least]:.0f}% of the time and {most} {busy[most]:.0f}%; "
            "look at the split above, and whether others use these GPUs (`dphybrid devices`)"
        ]
    return []
