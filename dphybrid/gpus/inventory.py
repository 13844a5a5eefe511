"""Read this machine's GPUs through NVML (memory, load, processes and their owners) and decide which are free.

They are in NVML's order, that of the PCI bus. GPUs that MIG splits are listed, and not used.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from dphybrid.config.settings import Settings
from dphybrid.util.errors import UserError, counted
from dphybrid.util.importing import import_named

GIB = 2**30
LOOK_EVERY_S = 1.0
"""Seconds between two readings of the GPUs, while a run waits for them and while it trains on them."""
_FREE_SHARE, _MAX_LOAD = 0.9, 10
"""A GPU is free if this share of its memory is unused and its load, in per cent, is at most this."""
REAL_NVML = "pynvml"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Process:
    """A compute process on a GPU. memory_bytes, owner, since and command are None where the system does not
    report them. is_own: whether it is the process that reads the GPUs, or a descendant of it."""

    pid: int
    memory_bytes: int | None
    is_own: bool = False
    owner: str | None = None
    since: datetime | None = None
    command: str | None = None


@dataclass(frozen=True)
class Gpu:
    """The state of a GPU at one moment.

    Attributes:
        label: "GPU 1".
        utilisation: NVML's latest load in per cent, None where it reports none.
        fault: Why the GPU cannot be used, such as NVML's error for it; a GPU with a fault is never free.
    """

    index: int
    label: str
    uuid: str
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    utilisation: int | None = None
    processes: tuple[Process, ...] = ()
    fault: str | None = None


class Inventory:
    """Reads the GPUs through a module with NVML's functions: nvidia-ml-py's `pynvml`, or a replacement.

    reason: why the last reading found no GPU. broken: a driver is installed, and it does not work. Raises
    UserError when the module cannot be imported.
    """

    def __init__(self, module: str = REAL_NVML) -> None:
        try:
            # pynvml may be missing here, and is then not looked for in the working folder.
            self._nvml: Any = importlib.import_module(module) if module == REAL_NVML else import_named(module)
        except ImportError as error:
            raise UserError(f"DPHYBRID_NVML={module!r}: cannot be imported ({error}); use pynvml") from error
        self.reason, self.broken = "", False
        self._open = False

    def read(self) -> tuple[Gpu, ...]:
        """Return all units now. Without a driver, return none and set `reason`; a GPU that fails is included
        with its `fault`."""
        nvml = self._nvml
        try:
            if not self._open:
                nvml.nvmlInit()
                self._open = True
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            # call nvmlInit again at the next reading: the driver may have been reloaded by then
            self.reason, self._open = f"NVML: {error}", False
            # Without NVML's library there is no driver. A driver that is installed and not loaded has GPUs.
            self.broken = error.value != nvml.NVML_ERROR_LIBRARY_NOT_FOUND
            return ()
        units = tuple(self._gpu(index) for index in range(count))
        self.broken = False
        self.reason = "" if units else "NVML reports no GPU"
        return units

    def _gpu(self, index: int) -> Gpu:
        nvml, gpu = self._nvml, Gpu(index, f"GPU {index}", f"unreadable-{index}")
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = replace(gpu, uuid=nvml.nvmlDeviceGetUUID(handle))
            if self._ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0]) == nvml.NVML_DEVICE_MIG_ENABLE:
                split = "is split by MIG, and dphybrid uses whole GPUs (`nvidia-smi -mig 0`)"
                return replace(gpu, fault=split)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            running = self._ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
            return replace(
                gpu,
                name=nvml.nvmlDeviceGetName(handle),
                total_bytes=int(memory.total),
                free_bytes=int(memory.free),
                utilisation=self._ask(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
                processes=tuple(_process(int(found.pid), found.usedGpuMemory) for found in running),
            )
        except nvml.NVMLError as error:  # fallen off the bus, say; the other GPUs remain usable
            return replace(gpu, fault=f"{error}; `nvidia-smi` may say more")

    def _ask(self, query: Callable[[], _T]) -> _T | None:
        """Return the answer, or None where the GPU does not support the query or this user may not ask."""
        nvml = self._nvml
        try:
            return query()
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
            return None


def _process(pid: int, memory_bytes: int | None) -> Process:
    import psutil  # here, because `--help` need not wait for it

    try:
        found = psutil.Process(pid)
        is_own = os.getpid() in (pid, *(parent.pid for parent in found.parents()))
        since = datetime.fromtimestamp(found.create_time())
        return Process(pid, memory_bytes, is_own, found.username(), since, found.name())
    except psutil.Error:  # it has just ended, or runs in another container
        return Process(pid, memory_bytes)


def describe_process(process: Process) -> str:
    """Return `38.0 GiB taken by ann since 09:12 (python, pid 4711)`."""
    memory = "memory" if process.memory_bytes is None else f"{process.memory_bytes / GIB:.1f} GiB"
    since = "" if process.since is None else f" since {clock_time(process.since)}"
    pid = f"pid {process.pid}"
    what = f"{process.command}, {pid}" if process.command else f"{pid} of another container"
    return f"{memory} taken by {process.owner or 'somebody'}{since} ({what})"


def clock_time(moment: datetime) -> str:
    """Return the time as 09:12, with the date in front if that is not today."""
    today = moment.date() == datetime.now(moment.tzinfo).date()
    return moment.strftime("%H:%M" if today else "%Y-%m-%d %H:%M")


def why_cpu(inventory: Inventory, units: Sequence[Gpu], settings: Settings) -> str:
    """Return why torch cannot use the GPUs of this machine; "" if it can, or if there are none.

    units: the visible GPUs, as `inventory` has just read them.
    """
    if inventory.broken:
        return inventory.reason
    if settings.nvml != REAL_NVML or not units:
        return ""  # simulated GPUs are virtual devices on the CPU
    import torch  # which takes a second

    listed = f"NVML lists {counted(len(units), 'GPU')}"
    if torch.version.cuda is None:
        return f"{listed}, and torch {torch.__version__} is a build without CUDA; install one with CUDA"
    if torch.cuda.device_count():  # does not start CUDA, which must see the leased GPUs alone
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{listed}, and CUDA does not start: {str(error).partition(chr(10))[0]}"
    return f"{listed}, and torch {torch.__version__} finds none"


def busy_reason(gpu: Gpu, settings: Settings) -> str | None:
    """Return why a GPU is not free at this moment, or None. Does not look at leases; see `find_holder`."""
    if gpu.fault:
        return f"{gpu.label}: {gpu.fault}"
    ignored = [name.strip() for name in settings.gpu_ignore.split(",")]
    foreign = [process for process in gpu.processes if process.command not in ignored and not process.is_own]
    if foreign:
        return f"{gpu.label}: " + ", ".join(describe_process(process) for process in foreign)
    # Without the rights to see other users' or containers' processes, only the used memory gives them away.
    if gpu.free_bytes < _FREE_SHARE * gpu.total_bytes:
        used = (gpu.total_bytes - gpu.free_bytes) / GIB
        of = f"{used:.1f} of {gpu.total_bytes / GIB:.1f} GiB"
        return f"{gpu.label}: {of} in use by processes that cannot be seen from here"
    if gpu.utilisation is not None and gpu.utilisation > _MAX_LOAD:
        return f"{gpu.label}: at {gpu.utilisation} % load"
    return None


def visible(units: Iterable[Gpu]) -> list[Gpu]:
    """Return the units that CUDA_VISIBLE_DEVICES names, in its order (unset: all). As in CUDA, the first
    unknown name ends the list.

    A number names a GPU in NVML's order (CUDA_DEVICE_ORDER=PCI_BUS_ID).
    """
    units, names = list(units), os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return units
    chosen: list[Gpu] = []
    # CUDA accepts the first characters of a UUID if they match one device only.
    for name in (part.strip() for part in names.split(",")):
        if name.isdigit():
            matching = [unit for unit in units if unit.index == int(name)]
        else:
            matching = [unit for unit in units if name.startswith("GPU-") and unit.uuid.startswith(name)]
        if len(matching) != 1:
            break
        chosen += [unit for unit in matching if unit not in chosen]
    return chosen
