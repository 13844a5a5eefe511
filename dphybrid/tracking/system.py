"""What the machine did meanwhile: processor, memory and each used GPU, every few seconds, beside the
training's own figures."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from dphybrid.tracking.base import Tracker
from dphybrid.util.memory import page_faults
from dphybrid.util.watching import watching

SAMPLE_EVERY_S = 10.0
MIB = 2**20

GpuReading = dict[str, float]
"""utilization_pct, memory_mb, memory_pct, power_w, temperature_c: those the device tells."""


class Averages:
    """Means of named values over all samples."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)

    @property
    def means(self) -> dict[str, float]:
        """Name -> mean."""
        return {name: total / count for name, (total, count) in self._sums.items()}


@contextmanager
def system_metrics(
    tracker: Tracker,
    since: float,
    gpus: Sequence[str] = (),
    averages: Averages | None = None,
    every_s: float = SAMPLE_EVERY_S,
) -> Iterator[None]:
    """While the block runs, record `system/...` metrics; their step counts seconds from `since`
    (time.time()), the run's start.

    gpus: UUIDs of the GPUs this run uses; others of the machine are not recorded. averages: collects the same
    values.
    """
    read = nvml_reader(gpus)
    own = psutil.Process()
    psutil.cpu_percent()
    own.cpu_percent()
    begun = max(0.0, time.time() - since) - time.monotonic()  # no clock that may be set back
    seen = (time.monotonic(), page_faults())

    def sample() -> bool:
        nonlocal seen
        (last, faults_before), seen = seen, (time.monotonic(), page_faults())
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_pct": psutil.cpu_percent(),
            "system/process_cpu_pct": own.cpu_percent(),
            "system/memory_pct": memory.percent,
            "system/process_rss_mb": own.memory_info().rss / MIB,
            "system/page_faults_per_s": (seen[1] - faults_before) / max(1e-3, seen[0] - last),
        }
        for index, reading in enumerate(read()):
            values |= {f"system/gpu{index}_{name}": value for name, value in reading.items()}
        if averages is not None:
            averages.add(values)
        tracker.log_metrics(values, int(begun + time.monotonic()))
        return False

    try:
        with watching(sample, every_s, "dphybrid-system"):
            yield
    finally:
        sample()


def nvml_reader(gpus: Sequence[str]) -> Callable[[], list[GpuReading]]:
    """Return a function that reads the GPUs with these UUIDs through NVML. A value that a device does not
    tell is left out."""
    if not gpus:
        return list
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver here
        return list

    def read_one(uuid: str) -> GpuReading:
        reading: GpuReading = {}
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError:
            return reading
        reading["memory_mb"] = memory.used / MIB
        reading["memory_pct"] = 100 * memory.used / memory.total
        ask: dict[str, Callable[[], float]] = {
            "utilization_pct": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": lambda: float(
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            ),
        }
        for name, question in ask.items():
            try:
                reading[name] = question()
            except pynvml.NVMLError:
                continue
        return reading

    return lambda: [read_one(uuid) for uuid in gpus]
