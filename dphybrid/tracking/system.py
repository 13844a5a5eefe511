"""The machine's load during a training (processor, memory and each used GPU), and warnings of devices that
were used badly."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import psutil

from dphybrid.util.limited import NVML_LIMIT_S, Limited

_MIB = 2**20
_UNEVEN = 1.25
"""A split is called uneven if its largest share is at least so many times its smallest."""
_BUSY_PCT = 50.0
"""A GPU below this mean utilization waits more than it works."""
_DEVICE_STAGES = ("forward", "backward", "replicate", "scatter", "gather", "loss", "dense_update")


class SystemMetrics:
    """Samples `system/...` metrics of this machine. gpus: UUIDs of the GPUs that the run uses."""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self._samples: dict[str, list[float]] = {}
        self._gpus, self._own = _gpu_reader(gpus), psutil.Process()
        # These calls return the load since the call before; the first one returns 0.
        psutil.cpu_percent()
        self._own.cpu_percent()
        self._last = time.monotonic()

    @property
    def means(self) -> dict[str, float]:
        """The means of the values so far, by name."""
        return {name: fmean(values) for name, values in self._samples.items()}

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
        with suppress(TimeoutError):  # the GPUs' driver hangs
            values |= self._gpus()
        for name, value in values.items():
            self._samples.setdefault(name, []).append(value)
        return values


def _gpu_reader(gpus: Sequence[str]) -> Callable[[], dict[str, float]]:
    """Return a function that reads the GPUs with these UUIDs through NVML, without the values that a device
    does not report. It raises TimeoutError when the driver hangs."""
    if not gpus:
        return dict
    import pynvml  # here, because a machine without GPUs needs no NVML

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
        for number, uuid in enumerate(gpus):
            for name, ask in questions.items():
                with suppress(pynvml.NVMLError):
                    values[f"system/gpu{number}_{name}"] = ask(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return values

    return Limited(read, NVML_LIMIT_S)


def balance_warnings(
    splits: Sequence[Mapping[str, Any]],
    num_devices: int,
    system: Mapping[str, float],
    stages: Mapping[str, float],
) -> list[str]:
    """Return a sentence with a remedy for each way in which devices were used badly.

    Args:
        splits: Rows of the split table.
        system: Means of the `system/...` metrics.
        stages: Stage -> seconds.
    """
    warnings = []
    # Split 1 is that of the first batch, which is full. Its first block stands for all.
    full = [row for row in splits if row["number"] == 1]
    rows = [int(row["rows"]) for row in full if row["block"] == full[0]["block"]]
    if rows and (len(rows) < num_devices or max(rows) >= _UNEVEN * min(rows)):
        batch = int(full[0]["batch_rows"])
        even = -(-batch // num_devices) * num_devices
        few = f"{num_devices - len(rows)} of {num_devices} devices got no rows of a batch of {batch}"
        one = f"one device got {min(rows)} rows of a batch of {batch} and the others {max(rows)}"
        remedy = f"set train.batch_size to a multiple of {num_devices}, such as {even}"
        warnings.append(f"{few if len(rows) < num_devices else one}; {remedy}")
    suffix = "_utilization_pct"
    busy = sorted((pct, name[7 : -len(suffix)]) for name, pct in system.items() if name.endswith(suffix))
    if not busy:
        return warnings
    (least_pct, least), (most_pct, most) = busy[0], busy[-1]
    if most_pct < _BUSY_PCT:
        waited = {stage: s for stage, s in stages.items() if stage not in _DEVICE_STAGES}
        stage = max(waited, key=waited.__getitem__, default="")
        share = waited.get(stage, 0.0) / (sum(stages.values()) or 1.0)
        longest = f"; the largest stage outside the GPUs is {stage} ({share:.0%} of the time)"
        warnings.append(
            f"the busiest GPU, {most}, worked {most_pct:.0f}% of the time{longest if stage else ''}; use a "
            "larger batch or fewer GPUs"
        )
    elif least_pct < _BUSY_PCT / 100 * most_pct:
        warnings.append(
            f"{least} worked {least_pct:.0f}% of the time and {most} {most_pct:.0f}%; look at the split "
            "above, and whether others use these GPUs (`dphybrid devices`)"
        )
    return warnings
