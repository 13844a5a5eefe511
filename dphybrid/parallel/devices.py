"""Resolves device texts to torch devices, and makes settings that CUDA reads when it starts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from dphybrid.util.device_spec import DeviceSpec, parse_device_spec
from dphybrid.util.errors import UserError


@dataclass(frozen=True)
class Devices:
    """The devices of a region's replicas.

    Attributes:
        text: Canonical device text.
        replicas: One torch device per replica, in split order.
        virtual: Whether replicas share hardware.
    """

    text: str
    replicas: tuple[torch.device, ...]
    virtual: bool

    def __len__(self) -> int:
        return len(self.replicas)

    @cached_property
    def home(self) -> torch.device:
        """The device of replica 0, where parameters live between steps."""
        return self.replicas[0]

    @property
    def at_once(self) -> bool:
        """Whether replicas run at the same time, in threads: if each has its own GPU."""
        return len(self.replicas) > 1 and self.home.type == "cuda" and not self.virtual

    @property
    def noun(self) -> str:
        """ "GPUs" if each replica has its own GPU, else "devices"."""
        return "GPUs" if self.home.type == "cuda" and not self.virtual else "devices"

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs, each once, in the form of nvidia-smi."""
        gpus = dict.fromkeys(device for device in self.replicas if device.type == "cuda")
        return tuple(f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """One name per replica: `cuda:1`, or `cpu[3]` for virtual device 3 on the CPU."""
        if not self.virtual:
            return tuple(str(device) for device in self.replicas)
        return tuple(f"{device}[{index}]" for index, device in enumerate(self.replicas))


def resolve_devices(spec: "str | Devices | Sequence[int | str | torch.device] | None") -> Devices:
    """Return the devices named by a text or a list (of CUDA indices, device texts or torch devices). -1 is
    the CPU; None is the value of `DPHYBRID_DEVICES` if set, else auto.

    Raises UserError for texts that cannot be parsed and for GPUs that do not exist.
    """
    if isinstance(spec, Devices):
        return spec
    if isinstance(spec, int | torch.device):
        text = _text_of(spec)
    elif isinstance(spec, str):
        text = spec
    elif spec is None:
        text = os.environ.get("DPHYBRID_DEVICES") or "auto"
    else:
        text = ",".join(_text_of(item) for item in spec)
    try:
        return _with_hardware(parse_device_spec(text))
    except UserError as error:
        raise UserError(f"devices={text!r}: {error}") from error


def device_count() -> int:
    """Return the number of replicas of `DataParallel(module)`: the visible GPUs, or the devices that
    `DPHYBRID_DEVICES` names."""
    return len(resolve_devices(None))


def before_cuda_starts() -> None:
    """Make cuBLAS, and cuDNN's RNNs, use a separate workspace for each stream, so that results have the same
    bits every time. CUDA reads the setting once, when it starts. A value set by the user stays."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")


def start_on(devices: Devices) -> None:
    """Make the devices' home the current CUDA device, to which events and streams without a device
    belong."""
    before_cuda_starts()
    if devices.home.type == "cuda":
        torch.cuda.set_device(devices.home)


def _text_of(item: int | str | torch.device) -> str:
    if isinstance(item, int):
        return "cpu" if item == -1 else f"cuda:{item}"
    return str(item)


def _with_hardware(parsed: DeviceSpec) -> Devices:
    count = torch.cuda.device_count()
    if parsed.count:  # auto*2: two GPUs or, without any GPU, the same split on the CPU
        return _with_hardware(
            parse_device_spec(
                ",".join(f"cuda:{i}" for i in range(parsed.count)) if count else f"cpu*{parsed.count}"
            )
        )
    names = parsed.names or tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)
    missing = [
        name for name in dict.fromkeys(names) if name.startswith("cuda") and int(name.split(":")[1]) >= count
    ]
    if missing:
        present = f"GPUs found: cuda:0 to cuda:{count - 1}" if count else "no GPU found"
        same = f", or cpu*{len(names)} for the same split" if len(names) > 1 else ""
        verb = "does" if len(missing) == 1 else "do"
        raise UserError(f"{', '.join(missing)} {verb} not exist ({present}); use cpu{same}")
    # Recorded by name, as auto means something else on another machine.
    text = ",".join(names) if parsed.is_auto else parsed.text
    return Devices(text, tuple(torch.device(name) for name in names), parsed.virtual)
