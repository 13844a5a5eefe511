"""`gather`, like torch's: joins the replicas' outputs. An output that cannot be joined raises an error that
names it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dphybrid.parallel.nests import is_nest, items_of, rebuild, refuse_attributes
from dphybrid.util.errors import UserError, type_text


class Leaf(NamedTuple):
    """Shape of a joined tensor, as far as it shows where the batch is. rows: number of rows on the batch dim
    per sample. rank: number of dims."""

    path: str
    rows: int
    rank: int


def gather(
    outputs: Sequence[object],
    target_device: torch.device | str | int,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Any:
    """Join the replicas' outputs along `dim`, on `target_device` (an int is a GPU's index, -1 the CPU).

    sizes: number of samples in each replica's share. If given, each tensor must have the same whole number of
    rows per sample. So a tensor with the batch on another dim, such as an RNN's state (layers, B, H), raises
    an error instead of being joined on the wrong dim. Raises UserError, with the place, for an output that
    cannot be joined.
    """
    return Join(as_device(target_device), dim, sizes)(list(outputs), "output")


def as_device(device: torch.device | str | int) -> torch.device:
    """Return the device; an int is a GPU's index, and -1 the CPU, as in torch.nn.parallel."""
    if isinstance(device, int):
        return torch.device("cpu") if device == -1 else torch.device("cuda", device)
    return torch.device(device)


class Join:
    """Joins the outputs of one forward. leaves: the tensors whose number of rows was checked; `probing` asks
    whether they match by chance."""

    __slots__ = ("dim", "leaves", "sizes", "target")

    def __init__(self, target: torch.device, dim: int, sizes: Sequence[int] | None) -> None:
        self.target, self.dim, self.sizes = target, dim, sizes
        self.leaves: list[Leaf] = []

    def __call__(self, outputs: list[Any], path: str) -> object:
        first = outputs[0]
        kind = type(first)
        for output in outputs:
            # Tensors of different classes may be joined: replica 0 may return an nn.Parameter, others a copy.
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
            f"{path}: {type_text(first)} cannot be joined over replicas; return tensors with the batch on "
            f"dim {self.dim}"
        )

    def _nests(self, outputs: list[object], path: str) -> object:
        first, maps = outputs[0], [items_of(output) for output in outputs]
        refuse_attributes(first, path)
        # Matched by key: replicas may have filled their dicts in different orders.
        if any(found.keys() != maps[0].keys() for found in maps):
            is_row = isinstance(first, tuple | list)
            kinds = f"sequences of {list(map(len, maps))} items" if is_row else "dicts with different keys"
            raise UserError(f"{path}: replicas returned {kinds}; return the same from each")
        return rebuild(
            first, [self([found[name] for found in maps], f"{path}[{name!r}]") for name in maps[0]]
        )

    def _tensors(self, outputs: list[Tensor], path: str) -> Tensor:
        first, dim, sizes = outputs[0], self.dim, self.sizes
        rank = first.dim()
        # torch joins 0-dim outputs to a vector. Its mean would give the samples of a short last share too
        # much weight.
        if not -rank <= dim < rank:
            raise UserError(
                f"{path}: a {rank}-dim tensor has no dim {dim} to join on; return one value per sample, such "
                'as a loss with reduction="none", and take the mean outside'
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
            # The sizes on the batch dim may differ; if the ranks do, the comparison below fails anyway.
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

    def _check_rows(self, outputs: list[Tensor], path: str, sizes: Sequence[int]) -> None:
        dim = self.dim
        per_sample, rest = divmod(outputs[0].shape[dim], sizes[0])
        for output, size in zip(outputs, sizes, strict=True):
            if rest or output.dim() != outputs[0].dim() or output.shape[dim] != per_sample * size:
                raise UserError(
                    f"{path}: size {tuple(output.shape)} for a share of {size} samples; return the batch on "
                    f"dim {dim}, with the same number of rows for each sample (transpose an RNN's state, "
                    "expand a value of the whole share)"
                )
        self.leaves.append(Leaf(path, per_sample, outputs[0].dim()))
