"""Catches on virtual devices what otherwise shows on two distinct GPUs only: a replica that touches another
device's tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary


class PlacementError(RuntimeError):
    """A replica used a tensor of another device."""


class Placement:
    """Which virtual device each tensor of one forward belongs to; a tensor nobody tagged belongs to device
    0."""

    def __init__(self) -> None:
        self._device = WeakTensorKeyDictionary()

    def tag(self, values: Any, device: int) -> None:
        """Say that all tensors of a nest belong to `device`."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._device[leaf] = device

    @contextmanager
    def running(self, device: int) -> Iterator[None]:
        """While the block runs, raise PlacementError when it touches a tensor of another device. 0-dim
        tensors may travel, as on GPUs."""
        with _Watch(self, device):
            yield

    def of(self, tensor: Tensor) -> int:
        return int(self._device.get(tensor, 0))


class _Watch(TorchDispatchMode):
    def __init__(self, placement: Placement, device: int) -> None:
        super().__init__()
        self._placement, self._index = placement, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.dim() > 0
                and (other := self._placement.of(leaf)) != self._index
            ):
                raise PlacementError(
                    f"replica {self._index} uses a tensor of size {tuple(leaf.shape)} of device {other} in "
                    f"{func}; register it as a parameter or buffer, or pass it as an input"
                )
        out = func(*args, **(kwargs or {}))
        self._placement.tag(out, self._index)
        return out
