"""A stand-in for nvidia-ml-py: the same functions, answers and errors, for GPUs that a JSON file describes.

FAKE_NVML names the file: {"init_error": NAME?, "gpus": [{"uuid", "total_gib", "free_gib", "load",
"processes": [[pid, gib], ...], "error": NAME?, "mig"?: true, "hides": ["load", "processes"]?}, ...]}.
Processes read it at each call, so a test can change their GPUs while they run.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
from pynvml import (  # noqa: F401 - callers catch and compare the real library's errors and constants
    NVML_DEVICE_MIG_ENABLE,
    NVML_ERROR_DRIVER_NOT_LOADED,
    NVML_ERROR_LIBRARY_NOT_FOUND,
    NVMLError,
    NVMLError_NoPermission,
    NVMLError_NotSupported,
)

_open = False


def write_state(file: Path, gpus: list[dict[str, Any]], **more: Any) -> None:
    """Write the file atomically: readers see the old or the new state, never half of it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps({"gpus": gpus, **more}))
    partial.replace(file)


def gpu(number: int, **more: Any) -> dict[str, Any]:
    """Return the description of a free GPU with 80 GiB."""
    free = {"total_gib": 80, "free_gib": 79.5, "load": 0, "processes": []}
    return {"uuid": f"GPU-{number:08d}-fake", **free, **more}


def stand_in(patch: Any, folder: Path, count: int, **settings: object) -> Path:
    """Give this process, and those that it starts, `count` free GPUs; return the file that describes them."""
    file = folder / "nvml.json"
    found = {"NVML": __name__, "LEASE_DIR": folder / "leases"} | settings
    for name, value in {f"DPHYBRID_{name}": value for name, value in found.items()}.items():
        patch.setenv(name, str(value))
    patch.setenv("FAKE_NVML", str(file))
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write_state(file, [gpu(number) for number in range(count)])
    return file


def _raise(name: str) -> None:
    raise NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))


def _state() -> dict[str, Any]:
    if not _open:
        _raise("UNINITIALIZED")
    return json.loads(Path(os.environ["FAKE_NVML"]).read_text())


def nvmlInit() -> None:
    global _open
    state = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    if "init_error" in state:
        _raise(state["init_error"])
    _open = True


def nvmlDeviceGetCount() -> int:
    return len(_state()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> tuple[int, ...]:
    if index >= len(_state()["gpus"]):
        _raise("INVALID_ARGUMENT")
    return (index,)


def _find(handle: tuple[int, ...]) -> dict[str, Any]:
    found = _state()["gpus"][handle[0]]
    if "error" in found:
        _raise(found["error"])
    return found


def nvmlDeviceGetUUID(handle: tuple[int, ...]) -> str:
    return _find(handle)["uuid"]


def nvmlDeviceGetName(handle: tuple[int, ...]) -> str:
    return "Fake H200" if _find(handle) else ""


def nvmlDeviceGetMigMode(handle: tuple[int, ...]) -> list[int]:
    found = _find(handle)
    if "mig" not in found:
        _raise("NOT_SUPPORTED")
    return [1, 1]


def nvmlDeviceGetMemoryInfo(handle: tuple[int, ...]) -> SimpleNamespace:
    found = _find(handle)
    total, free = int(found["total_gib"] * 2**30), int(found["free_gib"] * 2**30)
    return SimpleNamespace(total=total, free=free, used=total - free)


def nvmlDeviceGetComputeRunningProcesses(handle: tuple[int, ...]) -> list[SimpleNamespace]:
    found = _find(handle)
    if "processes" in found.get("hides", []):
        _raise("NO_PERMISSION")
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=None if gib is None else int(gib * 2**30))
        for pid, gib in found["processes"]
    ]


def nvmlDeviceGetUtilizationRates(handle: tuple[int, ...]) -> SimpleNamespace:
    found = _find(handle)
    if "load" in found.get("hides", []):
        _raise("NOT_SUPPORTED")
    return SimpleNamespace(gpu=found["load"], memory=0)


def nvmlDeviceGetHandleByUUID(uuid: str) -> tuple[int, ...]:
    (index,) = [index for index, found in enumerate(_state()["gpus"]) if found["uuid"] == uuid]
    return (index,)
