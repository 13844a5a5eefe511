"""The memory of a block on each device: parameters, gradients, optimizer states, and an estimate of
activations from a pass without data."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dphybrid.parallel.nests import map_tensors

_OPTIMIZER_STATES = {"sgd": 0, "adam": 2, "adamw": 2}
"""Numbers an optimizer keeps for each parameter."""


@dataclass(frozen=True)
class _DeviceMemory:
    """Bytes on one device. The first device also holds gradients and optimizer states; the others hold a copy
    of the parameters."""

    label: str
    rows: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def activation_bytes(module: nn.Module, args: object, kwargs: object) -> int:
    """Return the bytes that autograd keeps of one forward, its output included. Runs on the meta device: no
    memory, no data.

    args, kwargs: real or meta tensors of the right sizes. Raises whatever the module raises on meta tensors.
    """
    ghost = copy.deepcopy(module).to("meta")
    # weights are counted apart; a linear layer keeps its own for the backward
    own = {p.untyped_storage()._cdata for p in (*ghost.parameters(), *ghost.buffers())}
    kept: dict[int, int] = {}
    alive: list[object] = []  # a storage that is gone could lend its address to the next one

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            alive.append(storage)
            kept[storage._cdata] = storage.nbytes()
        return tensor

    meta_args, meta_kwargs = map_tensors(
        lambda t: t.detach().to("meta").requires_grad_(t.is_floating_point()), (args, kwargs)
    )
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = ghost(*meta_args, **meta_kwargs)
    map_tensors(keep, output)
    return sum(kept.values())


def block_memory(
    module: nn.Module,
    args: object,
    kwargs: object,
    sizes: Sequence[int],
    labels: Sequence[str],
    optimizer: str,
    dim: int = 0,
) -> list[_DeviceMemory]:
    """Return the memory of each device for a batch split into `sizes`. args, kwargs: one batch's inputs, with
    at least max(sizes) rows."""
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    by_rows: dict[int, int] = {}
    for rows in set(sizes):
        part = map_tensors(lambda t, rows=rows: t.narrow(dim, 0, rows) if t.dim() else t, (args, kwargs))  # type: ignore[misc]
        by_rows[rows] = activation_bytes(module, *part)
    return [
        _DeviceMemory(
            label=label,
            rows=rows,
            parameters=parameters + buffers,
            # The first device also sums the others' up.
            gradients=trained * (2 if len(sizes) > 1 and index == 0 else 1),
            optimizer=trained * _OPTIMIZER_STATES[optimizer] if index == 0 else 0,
            activations=by_rows[rows],
        )
        for index, (label, rows) in enumerate(zip(labels, sizes, strict=False))
    ]


def memory_text(devices: Sequence[_DeviceMemory]) -> str:
    """Return the table for people, in MiB."""
    titles = ("parameters", "gradients", "optimizer", "activations", "total")
    lines = [f"  {'device':<10}{'rows':>7}" + "".join(f"{t.replace('total', 'MiB'):>14}" for t in titles)]
    for device in devices:
        cells = "".join(f"{getattr(device, title) / 2**20:>14.1f}" for title in titles)
        lines.append(f"  {device.label:<10}{device.rows:>7}{cells}")
    note = "  Activations are an estimate; kernels' workspaces and the memory's fragmentation come on top."
    return "\n".join([*lines, note])
