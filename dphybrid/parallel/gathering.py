"""gather: the replicas' outputs as one. Like torch.nn.parallel.gather, but what cannot be joined is refused
with its place."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dphybrid.parallel.nests import is_nest, items_of, names_of, rebuild
from dphybrid.util.errors import UserError

Joining = Literal["rows", "concat", "weighted mean"]
"""What becomes of a tensor with one value a replica, such as a loss: refused, one value a replica, or the
mean weighted by the shares."""


class Leaf(NamedTuple):
    """A joined tensor, as far as it says where the batch is. rows: on the batch dim for each sample. rank:
    its number of dims."""

    path: str
    rows: int
    rank: int


def gather(
    outputs: Sequence[Any],
    target_device: torch.device | str | int,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    joining: Joining = "rows",
) -> Any:
    """Join the replicas' outputs on `dim`, on the device `target_device` (an int is a GPU, -1 the CPU).

    sizes: the samples of each replica's share. With it, a tensor must have the same whole number of rows for
    each sample: one that has its batch elsewhere, such as an RNN's state (layers, B, H), is refused instead
    of joined on the wrong dim. Raises UserError for what cannot be joined, with its place.
    """
    return Join(as_device(target_device), dim, sizes, joining)(list(outputs), "output")


def as_device(device: torch.device | str | int) -> torch.device:
    """Return the device; an int is a GPU's index, and -1 the CPU, as in torch.nn.parallel."""
    if isinstance(device, int):
        return torch.device("cpu") if device == -1 else torch.device("cuda", device)
    return torch.device(device)


class Join:
    """Joins one forward's outputs. leaves: what was joined by rows, for whoever wants to know whether it
    could be chance."""

    __slots__ = ("dim", "joining", "leaves", "sizes", "target")

    def __init__(self, target: torch.device, dim: int, sizes: Sequence[int] | None, joining: Joining) -> None:
        self.target, self.dim, self.sizes, self.joining = target, dim, sizes, joining
        self.leaves: list[Leaf] = []

    def __call__(self, outputs: list[Any], path: str) -> Any:
        first = outputs[0]
        kind = type(first)
        for output in outputs:
            if type(output) is not kind and not (isinstance(first, Tensor) and isinstance(output, Tensor)):
                kinds = ", ".join(type(o).__name__ for o in outputs)
                raise UserError(
                    f"{path}: replicas returned different types, {kinds}; return the same from each"
                )
        if isinstance(first, Tensor):
            return self._tensors(outputs, path)
        if first is None:
            return None
        if is_nest(first):
            return self._nests(outputs, path)
        if isinstance(first, PackedSequence):
            raise UserError(
                f"{path}: a PackedSequence has no batch dim to join on; unpack it inside the module "
                "(pad_packed_sequence with total_length)"
            )
        raise UserError(
            f"{path}: a {kind.__name__} cannot be joined over replicas; return tensors with the batch on "
            f"dim {self.dim}"
        )

    def _nests(self, outputs: list[Any], path: str) -> Any:
        first, names = outputs[0], names_of(outputs[0])
        if isinstance(names, range):
            columns = [items_of(output) for output in outputs]
            if len({len(column) for column in columns}) > 1:
                raise UserError(
                    f"{path}: replicas returned sequences of {[len(c) for c in columns]} items; return the "
                    "same number from each"
                )
            joined = [
                self(list(row), f"{path}[{name}]")
                for name, row in zip(names, zip(*columns, strict=True), strict=True)
            ]
            return rebuild(first, joined)
        # By key, not by place: replicas may have made their dicts in another order.
        maps = [dict(zip(names_of(output), items_of(output), strict=True)) for output in outputs]
        if any(found.keys() != maps[0].keys() for found in maps):
            raise UserError(
                f"{path}: replicas returned dicts with different keys; return the same keys from each"
            )
        return rebuild(first, [self([found[name] for found in maps], f"{path}[{name!r}]") for name in names])

    def _tensors(self, outputs: list[Tensor], path: str) -> Tensor:
        first, dim, sizes = outputs[0], self.dim, self.sizes
        if self.joining != "rows" and all(_is_lone(output, dim) for output in outputs):
            return self._lone(outputs)
        rank = first.dim()
        if not -rank <= dim < rank:
            raise UserError(
                f"{path}: a {rank}-dim tensor has no dim {dim} to join on; return one value a sample, such "
                'as a loss of shape (B,), or ask for one value a replica (gather="concat") or their mean '
                '(gather="weighted mean")'
            )
        if first.is_nested or first.layout not in (torch.strided, torch.sparse_coo):
            raise UserError(
                f"{path}: a nested, CSR or other compressed tensor cannot be joined; return a padded or COO "
                "tensor"
            )
        if sizes is not None:
            self._check_rows(outputs, path, sizes)
        shapes = [list(output.shape) for output in outputs]
        for shape in shapes:
            if len(shape) == rank:
                shape[dim] = 0
        if shapes.count(shapes[0]) < len(shapes):
            listed = ", ".join(str(tuple(output.shape)) for output in outputs)
            raise UserError(
                f"{path}: shapes {listed} cannot be joined on dim {dim}; return tensors with the batch on "
                f"dim {dim} and the rest equal"
            )
        target = self.target
        return torch.cat([output.to(target) for output in outputs], dim)

    def _lone(self, outputs: list[Tensor]) -> Tensor:
        moved = [output.to(self.target) for output in outputs]
        if self.joining == "concat":
            return torch.cat(
                [output.unsqueeze(0) if output.dim() == 0 else output for output in moved], self.dim
            )
        sizes = self.sizes or [1] * len(outputs)
        total = moved[0] * sizes[0]
        for output, size in zip(moved[1:], sizes[1:], strict=True):
            total = total + output * size
        return total / sum(sizes)

    def _check_rows(self, outputs: list[Tensor], path: str, sizes: Sequence[int]) -> None:
        dim = self.dim
        per_sample, rest = divmod(outputs[0].shape[dim], sizes[0])
        for output, size in zip(outputs, sizes, strict=True):
            if rest or output.dim() != outputs[0].dim() or output.shape[dim] != per_sample * size:
                raise UserError(_not_rows(path, output, size, dim))
        self.leaves.append(Leaf(path, per_sample, outputs[0].dim()))


def _not_rows(path: str, output: Tensor, size: int, dim: int) -> str:
    return (
        f"{path}: size {tuple(output.shape)} for a share of {size} samples; return the batch on dim {dim}, "
        "with the same number of rows for each sample (transpose an RNN's state, expand a value of the "
        "whole share)"
    )


def _is_lone(output: Tensor, dim: int) -> bool:
    return output.dim() == 0 or (-output.dim() <= dim < output.dim() and output.shape[dim] == 1)
