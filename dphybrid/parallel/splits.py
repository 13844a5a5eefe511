"""Plans and records how many rows of a batch each replica gets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dphybrid.parallel.nests import Parts, batch_tensor
from dphybrid.util.errors import UserError

Size = tuple[int, ...]
Key = tuple[tuple[Size, ...], tuple[Size, ...]]
"""(input sizes, output sizes) of the replicas of one forward."""


def split_sizes(batch_size: int, num_devices: int) -> list[int]:
    """Return the number of rows of each used device, in device order: the sizes of `torch.chunk`, so at most
    `num_devices`, all above 0. Raises UserError for arguments below 1."""
    if batch_size < 1 or num_devices < 1:
        raise UserError(f"cannot split {batch_size} rows over {num_devices} devices; both must be at least 1")
    chunk = -(-batch_size // num_devices)  # rounded up
    return [min(chunk, batch_size - start) for start in range(0, batch_size, chunk)]


def shares(count: int, rows: int) -> list[int]:
    """Return `split_sizes(rows, count)`, or [0] for an empty batch, on which the module still runs once."""
    return split_sizes(rows, count) if rows else [0]


class Record:
    """Splits of a region so far. counts: how often each occurred, in order of first appearance. last: the
    latest, the same object as long as it repeats. modules: parts that were found fit for replication; copied,
    tables: those of which each replica has a copy, and those that all share."""

    def __init__(self) -> None:
        self.counts: dict[Key, int] = {}
        self.last: Key | None = None
        self.modules: list[nn.Module] = []
        self.copied: list[nn.Module] = []
        self.tables: list[nn.Module] = []

    def note(self, key: Key) -> None:
        """Count a split."""
        if key != self.last:
            self.last = key
        self.counts[key] = self.counts.get(key, 0) + 1


def first_size(value: object) -> Size:
    """Return the size of a value's `batch_tensor`; () if there is none."""
    tensor = batch_tensor(value)
    if not isinstance(tensor, Tensor):
        return ()
    return (tensor.size(0),) if tensor.is_nested else tensor.shape


def sizes_of_shares(value: object, sizes: Sequence[int], dim: int) -> tuple[Size, ...]:
    """Return the size of a value's `batch_tensor` in each share, given the shares' rows."""
    batch = batch_tensor(value)
    if batch is None:
        return ((),) * len(sizes)
    if isinstance(batch, Parts):
        return tuple(part.shape for part in batch.tensors)
    shape, dim = batch.shape, dim % batch.dim()
    return tuple(torch.Size((*shape[:dim], size, *shape[dim + 1 :])) for size in sizes)


@dataclass(frozen=True)
class Split:
    """How a forward was split, with replicas in device order.

    Attributes:
        input_sizes, output_sizes: Size of the first tensor in each replica's inputs and outputs; () if there
            was none.
        devices: The replicas' device labels.
        count: Number of forwards that were split this way.
    """

    input_sizes: tuple[Size, ...]
    output_sizes: tuple[Size, ...]
    devices: tuple[str, ...]
    count: int = 1

    def lines(self) -> list[str]:
        """Return one line per replica, in device order, and one for the whole batch, formatted as in
        PyTorch's data-parallel tutorial."""
        replicas = zip(self.input_sizes, self.output_sizes, strict=True)
        inside = [
            f"\tIn Model: input size {_size(inputs)} output size {_size(outputs)}"
            for inputs, outputs in replicas
        ]
        return [
            *inside,
            f"Outside: input size {_size(_whole(self.input_sizes))} output_size "
            f"{_size(_whole(self.output_sizes))}",
        ]


def _size(size: Size) -> str:
    return f"torch.Size([{', '.join(map(str, size))}])"


def _whole(sizes: tuple[Size, ...]) -> Size:
    return (sum(size[0] for size in sizes), *sizes[0][1:]) if sizes[0] else ()
