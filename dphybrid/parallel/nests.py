"""Nested inputs and outputs: takes them apart and puts them together with torch.utils._pytree, counts their
rows, and refuses contents that cannot be split.

Containers are those that torch's pytree knows (tuple, list, dict, named tuple, OrderedDict, defaultdict,
deque, torch's return types, and every class registered with it, such as the model outputs of Hugging Face)
and dataclasses.
"""

import copy
import dataclasses
import gc
import types
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dphybrid.util.errors import UserError


@dataclasses.dataclass(frozen=True)
class Whole:
    """Marks a value (tensor, `Parts` or nest) that every replica gets unsplit, such as a (T, T) mask."""

    value: object


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Marks a value that is split already: one tensor per used replica, on the replica's device, with as many
    rows as the replica's share. Only a region takes it; operations on the rows belong inside."""

    tensors: Sequence[Tensor]

    def joined(self, device: torch.device, dim: int) -> Tensor:
        """Return all parts as one tensor on `device`."""
        return torch.cat([part.to(device) for part in self.tensors], dim)


def parts(tensors: Sequence[Tensor]) -> Tensor | Parts:
    """Wrap a value that is split already, such as the rows of `HostEmbedding.replica_rows`, as a region's
    input."""
    return tensors[0] if len(tensors) == 1 else Parts(tensors)


def is_leaf(value: object) -> bool:
    """Return whether torch's pytree must leave a value whole, although it would open it."""
    return isinstance(value, PackedSequence)  # a named tuple


def attributes(value: object) -> dict[str, object] | None:
    """Return a dataclass object's attributes, also those that are not fields; None for another value."""
    if not dataclasses.is_dataclass(value) or isinstance(value, Whole | Parts | type):
        return None
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return {name: getattr(value, name) for name in fields} | getattr(value, "__dict__", {})


def with_attributes(value: object, changed: Mapping[str, object]) -> object:
    """Return a copy of a dataclass object with other attributes. Its constructor does not run: a
    `__post_init__` would compute from a share what it computed from the batch."""
    new = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(new, name, item)
    return new


def flatten(value: object) -> tuple[list[Any], Callable[[Sequence[object]], Any]]:
    """Return a nest's leaves, and a function that returns such a nest with other leaves."""
    outer, spec = pytree.tree_flatten(value, is_leaf)
    parts = [_opened(leaf) for leaf in outer]

    def rebuilt(leaves: Sequence[object]) -> Any:
        rest = iter(leaves)
        return pytree.tree_unflatten([made(list(islice(rest, len(held)))) for held, made in parts], spec)

    return [leaf for held, _ in parts for leaf in held], rebuilt


def _opened(value: Any) -> tuple[list[Any], Callable[[Sequence[object]], Any]]:
    """Flatten what torch's pytree does not know: a dataclass by its attributes, all else as a leaf."""
    if (held := attributes(value)) is None:
        return [value], lambda leaves: leaves[0]
    inner, made = flatten(held)
    return inner, lambda leaves: with_attributes(value, made(leaves))


def leaves(value: object) -> list[Any]:
    """Return everything in a nest that is not a container."""
    return flatten(value)[0]


def map_leaves(function: Callable[[Any], object], value: object) -> Any:
    """Return the nest with `function` applied to everything in it that is not a container."""
    of_value, rebuilt = flatten(value)
    return rebuilt([function(leaf) for leaf in of_value])


def map_tensors(function: Callable[[Tensor], object], value: object) -> Any:
    """Return the nest with `function` applied to every tensor, and each `Whole` replaced by its value. Raises
    UserError for `Parts`."""

    def mapped(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Whole):
            return map_tensors(function, leaf.value)
        if isinstance(leaf, Parts):
            raise UserError(
                f"{len(leaf.tensors)} parts for a region with one device; place the table on this region's "
                "devices"
            )
        return leaf

    return map_leaves(mapped, value)


def batch_tensor(value: object) -> Tensor | Parts | None:
    """Return the first tensor with dims, or `Parts`, of a value: the one whose split is recorded. What is
    `Whole` has no batch."""
    if isinstance(value, Parts):
        return value
    if isinstance(value, Tensor):
        return value if value.is_nested or value.dim() else None
    if isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if (tensor := batch_tensor(item)) is not None:
                return tensor
    return None


def batch_rows(args: tuple[object, ...], kwargs: dict[str, object], dim: int) -> int | None:
    """Return the number of rows on `dim`, which is equal for all tensors, or None if there are none. 0-dim
    tensors are left out; every replica gets them.

    Raises UserError with all sizes if they disagree (torch would silently drop the rows beyond the smallest),
    and for values that contain tensors or data but cannot be split.
    """
    try:
        counts = {_num_rows(leaf, dim) for leaf in leaves((args, kwargs))} - {None}
        if len(counts) < 2 and -1 not in counts:
            return counts.pop() if counts else None
    except UserError:
        pass  # raised below, with the path
    listed = []
    for keys, held in pytree.tree_flatten_with_path((args, kwargs), is_leaf)[0]:
        path = f"input{pytree.keystr(keys[1:])}"
        for leaf in leaves(held):
            try:
                rows = _num_rows(leaf, dim)
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
            if rows is not None:
                listed.append(f"{path}: {f'no dim {dim}' if rows == -1 else rows}")
    raise UserError(
        f"tensors disagree on their rows (dim {dim}): {', '.join(listed)}; give each one row per sample, or "
        "wrap what all replicas share in Whole(...)"
    )


def _num_rows(leaf: object, dim: int) -> int | None:
    """Return a leaf's rows: None for one that every replica gets, -1 for a tensor that lacks the dim."""
    if isinstance(leaf, Parts):
        return sum(part.shape[dim] for part in leaf.tensors)
    if not isinstance(leaf, Tensor):
        if type(leaf) not in _PLAIN and not isinstance(leaf, Whole):
            _refuse_unsplittable(leaf)
        return None
    if leaf.is_nested or leaf.layout is not torch.strided:
        raise UserError(
            "a nested or sparse tensor cannot be split; give a padded or dense tensor, or values and offsets "
            "for each sample"
        )
    if not leaf.dim():
        return None
    return leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else -1


_PLAIN: frozenset[type] = frozenset(
    (types.NoneType, bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device)
)
"""Types whose values neither are nor contain tensors."""


def _refuse_unsplittable(leaf: Any) -> None:
    """Raise UserError for a leaf that holds the batch, so that every replica would get all of it, or that can
    be read only once."""
    kind = type(leaf).__name__
    if isinstance(leaf, PackedSequence):
        raise UserError(
            "a PackedSequence has no batch dim to split on; give the padded batch and its lengths, and pack "
            "inside the module"
        )
    if isinstance(leaf, Iterator):
        raise UserError(f"a {kind} can be read only once, by the first replica; give a list or a tensor")
    has_array = hasattr(type(leaf), "__array__") or hasattr(type(leaf), "__arrow_c_stream__")
    is_array = has_array and getattr(leaf, "ndim", None) != 0
    if is_array or isinstance(leaf, array | bytearray | memoryview):
        raise UserError(
            f"a {kind} is not split; give torch.from_numpy(...) or another tensor, or Whole(...) for what "
            "all replicas share"
        )
    # Attributes, slots and items. A function refers to all globals of its module, and so does the module.
    no_data = types.FunctionType | types.ModuleType | type
    held = [] if isinstance(leaf, no_data) else leaves(gc.get_referents(leaf))
    if isinstance(leaf, nn.Module) or any(isinstance(part, Tensor) for part in held):
        raise UserError(
            f"a {kind} carries tensors that cannot be split; give them as arguments, in a tuple, list, dict "
            "or dataclass, register the class with torch.utils._pytree, or wrap what all replicas share in "
            "Whole(...)"
        )
