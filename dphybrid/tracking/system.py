"""The machine's load during a training (processor, memory and each used GPU), and warnings of devices that
were used badly."""

import time
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
_UTILIZATION = "_utilization_pct"


class SystemMetrics:
    """Samples `system/...` metrics of this machine. gpus: UUIDs of the GPUs that the run uses.

    Attributes:
        means: The means of the values so far, by name.
    """

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self.means: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._gpus, self._own = _gpu_reader(gpus), psutil.Process()
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
        with suppress(TimeoutError):
            values |= self._gpus()
        for name, value in values.items():
            self._counts[name] = count = self._counts.get(name, 0) + 1
            mean = self.means.get(name, 0.0)
            self.means[name] = mean + (value - mean) / count
        return values


def _gpu_reader(gpus: Sequence[str]) -> Callable[[], dict[str, float]]:
    """Return a function that reads the GPUs with these UUIDs through NVML, without the values that a device
    does not report. It raises TimeoutError when the driver hangs."""
    if not gpus:
        return dict
    # Imported here, because a machine without GPUs needs no NVML.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver here
        return dict
    questions: dict[str, Callable[[Any], float]] = {
        "memory_mb": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / _MIB,
        "memory_pct": lambda gpu: 100 * (memory := pynvml.nvmlDeviceGetMemoryInfo(gpu)).used / memory.total,
        "utilization_pct": lambda gpu: float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "temperature_c": lambda gpu: float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    }

    def read() -> dict[str, float]:
        values: dict[str, float] = {}
        for index, uuid in enumerate(gpus):
            for name, ask in questions.items():
                with suppress(pynvml.NVMLError):
                    values[f"system/gpu{index}_{name}"] = ask(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return values

    return Limited(read, NVML_LIMIT_S)


def balance_warnings(
    splits: Sequence[Mapping[str, Any]],
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
    warnings = []
    # Split 1 is that of the first batch, which is full. Its first block stands for all.
    full = [row for row in splits if row["number"] == 1]
    rows = [int(row["rows"]) for row in full if row["block"] == full[0]["block"]]
    if num_devices > 1 and rows:
        batch = int(full[0]["batch_rows"])
        even = -(-batch // num_devices) * num_devices
        remedy = (
            f"of a batch of {batch}{{}}; set train.batch_size to a multiple of {num_devices}, such as {even}"
        )
        if len(rows) < num_devices:
            idle = num_devices - len(rows)
            warnings.append(f"{idle} of {num_devices} devices got no rows {remedy.format('')}")
        elif max(rows) >= _UNEVEN * min(rows):
            others = f" and the others {max(rows)}"
            warnings.append(f"one device got {min(rows)} rows {remedy.format(others)}")
    busy = {
        n.removeprefix("system/").removesuffix(_UTILIZATION): p
        for n, p in system.items()
        if _UTILIZATION in n
    }
    most, least = (max(busy, key=busy.__getitem__), min(busy, key=busy.__getitem__)) if busy else ("", "")
    if busy and busy[most] < _BUSY_PCT:
        waited = {seconds: stage for stage, seconds in stages.items() if stage not in _DEVICE_STAGES}
        longest = max(waited, default=0.0)
        share = longest / (sum(stages.values()) or 1.0)
        largest = (
            f"; the largest stage outside the GPUs is {waited[longest]} ({share:.0%} of the time)"
            if waited
            else ""
        )
        warnings.append(
            f"the busiest GPU, {most}, worked {busy[most]:.0f}% of the time{largest}; use a larger batch or "
            "fewer GPUs"
        )
    elif busy and busy[least] < _BUSY_PCT / 100 * busy[most]:
        warnings.append(
            f"{least} worked {busy[least]:.0f}% of the time and {most} {busy[most]:.0f}%; look at the split "
            "above, and whether others use these GPUs (`dphybrid devices`)"
        )
    return warnings
