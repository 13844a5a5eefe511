"""Lease the GPUs that a device text asks for, and give them back.

A run waits for its GPUs and then sees them as `cuda:0`, `cuda:1`, ... While it trains, a thread asks it to
stop when somebody asks for them, and at the end of training hours.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import torch

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.gpus.inventory import LOOK_EVERY_S, REAL_NVML, Gpu, Inventory, visible, why_cpu
from dphybrid.gpus.leases import Lease, Wanted, acquire, asked_by
from dphybrid.parallel import before_cuda_starts, resolve_devices
from dphybrid.util.device_spec import DeviceSpec, parse_device_spec
from dphybrid.util.errors import UserError, counted
from dphybrid.util.hours import parse_training_hours
from dphybrid.util.stop import StopRequest, watching


@dataclass(frozen=True)
class _LeasedDevices:
    """The devices of a run. text: for `resolve_devices`. lease: None on the CPU and where NVML does not
    answer."""

    text: str
    lease: Lease | None = None

    @property
    def tags(self) -> dict[str, str]:
        """Tags for the run's record that name its GPUs."""
        if self.lease is None:
            return {}
        return {"dphybrid.gpus": ", ".join(f"{gpu.label} {gpu.name} {gpu.uuid}" for gpu in self.lease.gpus)}


def expected_devices(config: ExperimentConfig, settings: Settings) -> str:
    """Return the device text that a run would get if all GPUs that it wants were free. Raises UserError for
    GPUs that do not exist."""
    spec = _wanted_spec(config, settings)
    units, why_not = _usable(spec, Inventory(settings.nvml), settings)
    if not units or why_not:
        return resolve_devices(spec.text).text
    return _text(spec, range(_wanted(spec, units, settings).most), settings)


def _wanted_spec(config: ExperimentConfig, settings: Settings) -> DeviceSpec:
    """Return the config's devices, or those of the settings if the config says auto."""
    return parse_device_spec(settings.devices if config.devices == "auto" else config.devices)


def _usable(spec: DeviceSpec, inventory: Inventory, settings: Settings) -> tuple[list[Gpu], str]:
    """Return the GPUs to choose from, none if the CPU was asked for, and why torch cannot use them."""
    if "cpu" in spec.names:
        return [], ""
    units = visible(inventory.read())
    return units, why_cpu(inventory, units, settings)


def _wanted(spec: DeviceSpec, units: Sequence[Gpu], settings: Settings, replicas: int = 0) -> Wanted:
    """Return which of these GPUs a run needs. `auto` takes as many as a resumed run had (replicas), or else
    all that are free, and never more than DPHYBRID_MAX_GPUS. Raises UserError if too few exist."""
    # a set: `cuda:1*2` computes two replicas on one GPU, which is leased once
    numbers = sorted({_number(name) for name in spec.names})
    if missing := [number for number in numbers if number >= len(units)]:
        there = f"{len(units)} GPUs are visible (see `dphybrid devices`)"
        raise UserError(f"devices: cuda:{missing[0]} does not exist; {there}")
    limit = min(len(units), settings.max_gpus or len(units))
    count = len(numbers) or spec.count or min(replicas, limit)
    if count > len(units):
        raise UserError(
            f"devices: {counted(count, 'GPU')} wanted, {len(units)} visible; ask for fewer, or change "
            "CUDA_VISIBLE_DEVICES"
        )
    chosen = [units[number] for number in numbers] or units
    return Wanted(tuple(chosen), count or 1, count or limit)


def _number(name: str) -> int:
    """Return the 1 of `cuda:1`."""
    return int(name.partition(":")[2])


def _text(spec: DeviceSpec, numbers: Sequence[int], settings: Settings) -> str:
    """Return the device text of a run on these GPUs, in torch's numbers, in the order of `Wanted.gpus`:
    `cuda:2*2` is `cuda:0,cuda:0` if CUDA sees GPU 2 alone.

    Simulated GPUs (DPHYBRID_NVML) have real leases, but torch computes on as many virtual devices.
    """
    if settings.nvml != REAL_NVML:
        count = len(spec.names) or len(numbers)
        return f"cpu*{count}" if count > 1 else "cpu"
    wanted = sorted({_number(name) for name in spec.names})
    now = dict(zip(wanted, numbers, strict=False))
    chosen = [now[_number(name)] for name in spec.names] or numbers
    return ",".join(f"cuda:{number}" for number in chosen)


@contextmanager
def leased_devices(
    config: ExperimentConfig,
    settings: Settings,
    *,
    run: str,
    replicas: int = 0,
    on_wait: Callable[[str], None] | None = None,
    stop: StopRequest | None = None,
) -> Iterator[_LeasedDevices]:
    """Wait for the GPUs that the config wants and lease them while the block runs.

    Raises UserError, and Interrupted for `stop`.

    Args:
        run: The run's name, shown to other users.
        replicas: How many devices a resumed run had. `auto` takes as many again, so that the result keeps its
            bits, or fewer if it may take only fewer.
        on_wait: Called with the reason for waiting.
        stop: A request that ends the waiting.
    """
    spec, inventory = _wanted_spec(config, settings), Inventory(settings.nvml)
    units, why_not = _usable(spec, inventory, settings)
    if why_not:
        if not spec.is_auto or spec.count:
            raise UserError(f"devices={spec.text}: {why_not}; `dphybrid doctor` checks the GPUs")
        print(f"Note: trains on the CPU: {why_not}", flush=True)
        spec, units = parse_device_spec("cpu"), []
    if not units:
        if "cpu" not in spec.names and torch.cuda.device_count():
            print(f"Note: GPUs are used without a lease: {inventory.reason or 'NVML does not know them'}")
        yield _LeasedDevices(resolve_devices(spec.text).text)
        return
    wanted = _wanted(spec, units, settings, replicas)
    if spec.is_auto and not spec.count and replicas > wanted.most:
        few = f"Note: this run had {replicas} devices, and may take {counted(wanted.most, 'GPU')} here"
        print(f"{few}; its results will be rounded differently", flush=True)
    report = on_wait or (lambda reason: print(f"Waiting for GPUs: {reason}", flush=True))
    with acquire(wanted, inventory, settings, run=run, on_wait=report, stop=stop) as lease:
        print(f"Leased: {', '.join(gpu.label for gpu in lease.gpus)}", flush=True)
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            simulated = settings.nvml != REAL_NVML
            numbers = range(len(lease.gpus)) if simulated else _show_to_torch(lease.gpus)
            yield _LeasedDevices(_text(spec, numbers, settings), lease)
        finally:  # a later run of this process can choose among all GPUs again
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def _show_to_torch(gpus: tuple[Gpu, ...]) -> list[int]:
    """Hide all GPUs but the leased ones from CUDA; return torch's numbers of the leased GPUs.

    With CUDA_VISIBLE_DEVICES set to the leased GPUs, nothing can open a context on another user's GPU. But
    CUDA may have read the variable earlier, even if torch has not initialised it: calling
    `torch.cuda.is_available()` is enough. So the numbers come from CUDA's own UUIDs.
    """
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
    before_cuda_starts()
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch build without CUDA
        raise UserError(
            f"{', '.join(gpu.label for gpu in gpus)}: leased, but CUDA does not start: {error}; check "
            "`nvidia-smi`, or use devices=cpu"
        ) from error
    numbers = []
    for gpu in gpus:
        own = gpu.uuid.removeprefix("GPU-")
        if own not in uuids:
            raise UserError(
                f"{gpu.label}: CUDA was started in this process without it; start the run in a new process"
            )
        numbers.append(uuids.index(own))
    return numbers


@contextmanager
def giving_way(devices: _LeasedDevices, settings: Settings, stop: StopRequest) -> Iterator[None]:
    """While the block runs, ask its run to stop and to be queued again once `reason_to_yield` finds a
    reason."""
    lease = devices.lease
    if lease is None:
        yield
        return

    def look() -> bool:
        reason = reason_to_yield(lease, settings, datetime.now())
        if reason:
            stop.ask(reason, requeue=True)
        return reason is not None

    with watching(look, LOOK_EVERY_S, "dphybrid-giving-way"):
        yield


def reason_to_yield(lease: Lease, settings: Settings, now: datetime) -> str | None:
    """Return why the GPUs should be given back at this moment, or None."""
    if closed := parse_training_hours(settings.training_hours).closed_reason(now):
        return f"the end of training hours ({closed})"
    return asked_by(lease)
