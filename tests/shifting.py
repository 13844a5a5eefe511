"""Tensors at addresses that torch's allocator does not choose, but slices of a batch have."""

import torch
from torch import Tensor, nn


def shifted(tensor: Tensor, shift_bytes: int) -> Tensor:
    """Return a contiguous copy of a tensor, so many bytes behind a multiple of 64."""
    size = tensor.element_size()
    assert shift_bytes % size == 0
    held = torch.empty(tensor.numel() + 128 // size, dtype=tensor.dtype)
    first = (-held.data_ptr() % 64 + shift_bytes) // size
    return held[first : first + tensor.numel()].view(tensor.shape).copy_(tensor.detach())


def shift_parameters(module: nn.Module, shift_bytes: int) -> None:
    """Move each parameter of a module to such an address."""
    for parameter in module.parameters():
        parameter.data = shifted(parameter.data, shift_bytes)
