"""`gather`, like torch's: joins the replicas' outputs. An output that cannot be joined raises an error that
names it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dphybrid.parallel.nests import attributes, is_leaf, with_attributes
from dphybrid.util.errors import UserError, type_text


def gather(
    outputs: Sequence[Any],
    target_device: torch.device | str | int,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Any:
    """Join the replicas' outputs along `dim`, on `target_device` (an int is a GPU's index, -1 the CPU).

    sizes: number of samples in each replica's share. If given, each tensor must have the same whole number of
    rows per sample. So a tensor with the batch on another dim, such as an RNN's state (layers, B, H), raises
    an error for shares of two sizes instead of being joined on the wrong dim. Raises UserError, with the
    path, for an output that cannot be joined.
    """
    try:
        return _join(list(outputs), as_device(target_device), dim, sizes)
    except _CannotJoin as error:
        raise UserError(f"output{error.path}: {error}") from None


class _CannotJoin(Exception):
    """An output that cannot be joined. path: of its place in the outputs, found only once it is needed."""

    path = ""


def as_device(device: torch.device | str | int) -> torch.device:
    """Return the device; an int is a GPU's index, and -1 the CPU, as in torch.nn.parallel."""
    if isinstance(device, int):
        return torch.device("cpu") if device == -1 else torch.device("cuda", device)
    return torch.device(device)


def _join(outputs: list[Any], target: torch.device, dim: int, sizes: Sequence[int] | None) -> Any:
    if all(isinstance(output, Tensor) for output in outputs):
        return _join_tensors(outputs, target, dim, sizes)
    joined, spec = pytree.tree_flatten(outputs[0], is_leaf)
    try:
        # By key: replicas may have filled their dicts in different orders.
        columns = [spec.flatten_up_to(output) for output in outputs]
    except ValueError as error:
        text = f"replicas returned different containers ({error}); return the same from each"
        raise _CannotJoin(text) from None
    for index in range(len(joined)):
        try:
            joined[index] = _join_leaf([column[index] for column in columns], target, dim, sizes)
        except _CannotJoin as error:
            keys, _ = pytree.tree_flatten_with_path(outputs[0], is_leaf)[0][index]
            error.path = pytree.keystr(keys) + error.path
            raise
    return pytree.tree_unflatten(joined, spec)


def _join_leaf(outputs: list[Any], target: torch.device, dim: int, sizes: Sequence[int] | None) -> Any:
    first = outputs[0]
    for output in outputs:
        # Tensors of different classes may be joined: replica 0 may return an nn.Parameter, others a copy.
        if type(output) is not type(first) and not (isinstance(first, Tensor) and isinstance(output, Tensor)):
            kinds = ", ".join(type(o).__name__ for o in outputs)
            raise _CannotJoin(f"replicas returned different types, {kinds}; return the same from each")
    if isinstance(first, Tensor):
        return _join_tensors(outputs, target, dim, sizes)
    if first is None:
        return None
    if isinstance(first, PackedSequence):
        raise _CannotJoin(
            "a PackedSequence has no batch dim to join on; unpack it inside the module (pad_packed_sequence "
            "with total_length)"
        )
    if attributes(first) is not None:
        return with_attributes(first, _join([attributes(output) for output in outputs], target, dim, sizes))
    raise _CannotJoin(
        f"{type_text(first)} cannot be joined over replicas; return tensors with the batch on dim {dim}"
    )


def _join_tensors(
    outputs: list[Tensor], target: torch.device, dim: int, sizes: Sequence[int] | None
) -> Tensor:
    first, rank = outputs[0], outputs[0].dim()
    # torch joins 0-dim outputs to a vector. Its mean would give the samples of a short last share too much
    # weight.
    if not -rank <= dim < rank:
        raise _CannotJoin(
            f"a {rank}-dim tensor has no dim {dim} to join on; return one value per sample, such as "
            'a loss with reduction="none", and take the mean outside'
        )
    if first.is_nested or first.layout is not torch.strided:
        raise _CannotJoin("a nested or sparse tensor cannot be joined; return a padded or dense tensor")
    if sizes is not None:
        per_sample, rest = divmod(first.shape[dim], sizes[0])
        for output, size in zip(outputs, sizes, strict=True):
            if rest or output.dim() != rank or output.shape[dim] != per_sample * size:
                raise _CannotJoin(
                    f"size {tuple(output.shape)} for a share of {size} samples; return the batch on dim "
                    f"{dim}, with the same number of rows for each sample (transpose an RNN's state, expand "
                    "a value of the whole share)"
                )
    shapes = [list(output.shape) for output in outputs]
    for shape in shapes:
        # The sizes on the batch dim may differ; if the ranks do, the comparison below fails anyway.
        if len(shape) == rank:
            shape[dim] = 0
    if shapes.count(shapes[0]) < len(shapes):
        listed = ", ".join(str(tuple(output.shape)) for output in outputs)
        raise _CannotJoin(
            f"shapes {listed} cannot be joined on dim {dim}; return tensors with the batch on dim "
            f"{dim} and the rest equal"
        )
    return torch.cat([output.to(target) for output in outputs], dim)
