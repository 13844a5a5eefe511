"""Records the machine's load every few seconds (processor, memory and each used GPU), and warns of devices
that were used badly."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from dphybrid.tracking.tracker import Tracker
from dphybrid.util.limited import NVML_LIMIT_S, Limited
from dphybrid.util.memory import page_faults
from dphybrid.util.stop import watching

_SAMPLE_EVERY_S = 10.0
_MIB = 2**20

_UNEVEN = 1.25
"""A split is called uneven if its largest share is at least so many times its smallest."""

_BUSY_PCT = 50.0
"""A GPU below this mean utilization waits more than it works."""

_DEVICE_STAGES = ("forward", "backward", "replicate", "scatter", "gather", "loss", "dense_update")

_GpuReading = dict[str, float]
"""utilization_pct, memory_mb, memory_pct, power_w, temperature_c: those that the device reports."""


@contextmanager
def system_metrics(
    tracker: Tracker, since: float, gpus: Sequence[str] = (), every_s: float = _SAMPLE_EVERY_S
) -> Iterator[dict[str, float]]:
    """While the block runs, record `system/...` metrics; their steps are seconds since `since` (time.time()),
    the run's start. Yields the means of their values so far.

    gpus: UUIDs of the GPUs that this run uses; the machine's other GPUs are not recorded.
    """
    means: dict[str, float] = {}
    counts: Counter[str] = Counter()
    read = _nvml_reader(gpus)
    own = psutil.Process()
    # These calls return the load since the call before; the first returns 0 and is thrown away here.
    psutil.cpu_percent()
    own.cpu_percent()
    # Seconds by the monotonic clock from here on: time.time() may be set back.
    offset_s = max(0.0, time.time() - since) - time.monotonic()
    seen = (time.monotonic(), page_faults())

    def sample() -> bool:
        nonlocal seen
        (last, faults_before), seen = seen, (time.monotonic(), page_faults())
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_pct": psutil.cpu_percent(),
            "system/process_cpu_pct": own.cpu_percent(),
            "system/memory_pct": memory.percent,
            "system/process_rss_mb": own.memory_info().rss / _MIB,
            "system/page_faults_per_s": (seen[1] - faults_before) / max(1e-3, seen[0] - last),
        }
        for index, reading in enumerate(read()):
            values |= {f"system/gpu{index}_{name}": value for name, value in reading.items()}
        counts.update(values.keys())
        for name, value in values.items():
            means[name] = means.get(name, 0.0) + (value - means.get(name, 0.0)) / counts[name]
        tracker.log_metrics(values, int(offset_s + time.monotonic()))
        return False

    try:
        with watching(sample, every_s, "dphybrid-system"):
            yield means
    finally:
        # Also gives one sample to a run that is shorter than the first interval.
        sample()


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
