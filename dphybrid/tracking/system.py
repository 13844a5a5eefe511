"""The machine's load during a training: processor, memory and each used GPU."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

_MIB = 2**20


class SystemMetrics:
    """Samples `system/...` metrics of this machine. gpus: UUIDs of the GPUs that the run uses."""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
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
        return values | self._gpus()


def _gpu_reader(gpus: Sequence[str]) -> Callable[[], dict[str, float]]:
    """Return a function that reads the GPUs with these UUIDs through NVML, without the values that a device
    does not report."""
    if not gpus:
        return dict
    import pynvml  # here, because a machine without GPUs needs no NVML

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver here
        return dict
    questions: dict[str, Callable[[Any], float]] = {
        "memory_mb": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / _MIB,
        "utilization_pct": lambda gpu: float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    }

    def read() -> dict[str, float]:
        values: dict[str, float] = {}
        for number, uuid in enumerate(gpus):
            for name, ask in questions.items():
                with suppress(pynvml.NVMLError):
                    values[f"system/gpu{number}_{name}"] = ask(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return values

    return read
