"""Nested inputs and outputs: takes them apart and puts them together with torch.utils._pytree, counts their
rows, and refuses contents that cannot be split.

Containers are those that torch's pytree knows (tuple, list, dict, named tuple, OrderedDict, defaultdict,
deque, torch's return types, and every class registered with it, such as the model outputs of Hugging Face),
dataclasses, and subclasses of dict, list and tuple.
"""

import array
import copy
import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dphybrid.util.errors import UserError, type_text


@dataclasses.dataclass(frozen=True)
class Whole:
    """Marks a value (tensor or nest) that every replica gets unsplit, such as a (T, T) attention mask."""

    value: object


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Marks a value that is split already: one tensor per used replica, on the replica's device, with as many
    rows as the replica's share."""

    tensors: Sequence[Tensor]

    def joined(self, device: torch.device, dim: int) -> Tensor:
        """Return all parts as one tensor on `device`."""
        return torch.cat([part.to(device) for part in self.tensors], dim)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and others only ask whether a special method exists
            raise AttributeError(name)
        raise AttributeError(_only_in_regions(name))

    @classmethod
    def __torch_function__(cls, function: Callable[..., object], *_: object) -> None:
        # torch functions and layers call this for an argument that has it. Without it, their error would only
        # name this class and not say what to do.
        raise AttributeError(_only_in_regions(function.__name__))


def _only_in_regions(name: str) -> str:
    return (
        f"{name}: these rows are on their devices already, in parts, and only a region takes them; call "
        f"{name} inside the region's module"
    )


def _refusing(operator: str) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise UserError(_only_in_regions(operator))

    return refuse


# Python looks operators up in the class, so `__getattr__` does not see them.
for _operator in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul", "rand", "ror", "rxor"),
    *("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"),
    *("len", "bool", "iter", "getitem", "setitem", "contains", "float", "int"),
):
    setattr(Parts, f"__{_operator}__", _refusing(_operator))


def parts(tensors: Sequence[Tensor]) -> Tensor | Parts:
    """Wrap a value that is split already, such as the rows of `HostEmbedding.replica_rows`, as a region's
    input."""
    return tensors[0] if len(tensors) == 1 else Parts(tensors)


# Taking apart and putting together


def flatten(value: object) -> tuple[list[Any], pytree.TreeSpec]:
    """Return a nest's leaves and what `unflatten` needs. Containers that torch does not know are leaves here;
    see `opened`."""
    return pytree.tree_flatten(value, _is_leaf)


unflatten = pytree.tree_unflatten


def _is_leaf(value: object) -> bool:
    return isinstance(value, PackedSequence | deque)  # for torch a named tuple and a list


def opened(value: object) -> tuple[list[Any], list[object]] | None:
    """Return the names and items of a container that torch's pytree does not know, or None for another value.
    Raises UserError for a container with tensors in attributes that are not items."""
    if isinstance(value, Whole | Parts | type | PackedSequence | torch.Size):
        return None
    if isinstance(value, deque) and not any(isinstance(leaf, Tensor) for leaf in leaves(list(value))):
        return None  # numbers, one for each sample perhaps
    if isinstance(value, dict | list | tuple | deque):
        if any(isinstance(leaf, Tensor) for held in held_by(value) for leaf in leaves(held)):
            raise UserError(
                f"{type_text(value)} carries a tensor beside its items; give it as an item or an argument, "
                "or register the class with torch.utils._pytree"
            )
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        names, items = zip(*pairs, strict=True) if value else ((), ())
        return list(names), list(items)
    if dataclasses.is_dataclass(value):
        # All attributes, including those that __post_init__ set in addition to the fields.
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        attributes = list(dict.fromkeys([*fields, *getattr(value, "__dict__", {})]))
        return attributes, [getattr(value, name) for name in attributes]
    return None


def rebuilt(like: Any, names: list[Any], items: Sequence[object]) -> object:
    """Return a container like `like`, which was `opened`, with other items. No constructor runs: a
    `__post_init__` would compute from a share what it computed from the batch."""
    new: Any
    if isinstance(like, tuple):
        new = tuple.__new__(type(like), items)
        vars(new).update(vars(like)) if hasattr(like, "__dict__") else None
        return new
    new = copy.copy(like)
    if isinstance(like, list | deque):
        new.clear()
        new.extend(items)
    elif isinstance(like, dict):
        for name, item in zip(names, items, strict=True):
            new[name] = item
    else:
        for name, item in zip(names, items, strict=True):
            object.__setattr__(new, name, item)
    return new


def leaves(value: object) -> list[Any]:
    """Return everything in a nest that is not a container."""
    found: list[Any] = []
    for leaf in flatten(value)[0]:
        inner = None if isinstance(leaf, Tensor) or type(leaf) in PLAIN else opened(leaf)
        found += [leaf] if inner is None else leaves(inner[1])
    return found


def named_leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for everything in a nest that is not a container."""
    for keys, leaf in pytree.tree_flatten_with_path(value, _is_leaf)[0]:
        where = path + pytree.keystr(keys)
        if (inner := opened(leaf)) is None:
            yield where, leaf
        else:
            for name, item in zip(*inner, strict=True):
                yield from named_leaves(item, f"{where}[{name!r}]")


def path_of(value: object, index: int) -> str:
    """Return the path, such as `['a'][0]`, of a leaf of `flatten`."""
    return pytree.keystr(pytree.tree_flatten_with_path(value, _is_leaf)[0][index][0])


def map_leaves(function: Callable[[Any], object], value: object) -> Any:
    """Return the nest with `function` applied to everything in it that is not a container."""
    found, spec = flatten(value)
    for index, leaf in enumerate(found):
        inner = None if isinstance(leaf, Tensor) else opened(leaf)
        if inner is None:
            found[index] = function(leaf)
        else:
            found[index] = rebuilt(leaf, inner[0], [map_leaves(function, item) for item in inner[1]])
    return unflatten(found, spec)


def joined(value: object, device: torch.device, dim: int) -> Any:
    """Return the nest with each `Parts` joined to one tensor on `device`."""
    return map_leaves(lambda leaf: leaf.joined(device, dim) if isinstance(leaf, Parts) else leaf, value)


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


# Rows


def batch_tensor(value: object) -> Tensor | Parts | None:
    """Return the first tensor with dims, or `Parts`, of a value: the one whose split is recorded. What is
    `Whole` has no batch."""
    if isinstance(value, Parts):
        return value
    if isinstance(value, Tensor):
        return value if value.is_nested or value.dim() else None
    if isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if (found := batch_tensor(item)) is not None:
                return found
    return None


def named_inputs(args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield (path used in messages, leaf) for a call's arguments: `input 0`, or the keyword."""
    for index, value in enumerate(args):
        yield from named_leaves(value, f"input {index}")
    for name, value in kwargs.items():
        yield from named_leaves(value, name)


def batch_rows(args: tuple[object, ...], kwargs: dict[str, object], dim: int) -> int | None:
    """Return the number of rows on `dim`, which is equal for all tensors, or None if there are none. 0-dim
    tensors are left out; every replica gets them.

    Raises UserError with all sizes if they disagree (torch would silently drop the rows beyond the smallest),
    and for values that contain tensors or data but cannot be split.
    """
    try:
        found = {rows for leaf in leaves((args, kwargs)) if (rows := _num_rows(leaf, dim)) is not None}
    except UserError:
        for path, leaf in named_inputs(args, kwargs):
            try:
                _num_rows(leaf, dim)
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
        raise
    if len(found) > 1 or -1 in found:
        sized = ((path, _num_rows(leaf, dim)) for path, leaf in named_inputs(args, kwargs))
        listed = ", ".join(
            f"{path}: {f'no dim {dim}' if rows == -1 else rows}" for path, rows in sized if rows is not None
        )
        raise UserError(
            f"tensors disagree on their rows (dim {dim}): {listed}; give each one row per sample, or wrap "
            "what all replicas share in Whole(...)"
        )
    return found.pop() if found else None


def _num_rows(leaf: object, dim: int) -> int | None:
    """Return a leaf's rows: None for one that every replica gets, -1 for a tensor that lacks the dim."""
    if isinstance(leaf, Parts):
        return sum(part.shape[dim] for part in leaf.tensors)
    if not isinstance(leaf, Tensor):
        if type(leaf) not in PLAIN and not isinstance(leaf, Whole):
            _refuse_unsplittable(leaf)
        return None
    if leaf.is_nested or leaf.layout not in (torch.strided, torch.sparse_coo):
        kind = "nested (jagged)" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        raise UserError(
            f"a {kind} tensor cannot be split; give a padded tensor, one in COO layout, or values and "
            "offsets for each sample"
        )
    if leaf.is_sparse and leaf.requires_grad:
        raise UserError(
            "a sparse tensor that requires grad cannot be split (torch has no backward for it); give its "
            "indices and values as separate inputs"
        )
    if not leaf.dim():
        return None
    return leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else -1


PLAIN: frozenset[type] = frozenset(
    (types.NoneType, bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device)
)
"""Types whose values neither are nor contain tensors."""

_ARRAYS = ("__array__", "__dataframe__", "__arrow_c_stream__", "__arrow_c_array__")
"""Methods by which classes of numpy, pandas, polars, pyarrow and others give their data."""


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
    is_scalar = getattr(leaf, "ndim", None) == 0
    is_array = not is_scalar and any(hasattr(type(leaf), name) for name in _ARRAYS)
    if is_array or isinstance(leaf, array.array | bytearray | memoryview | deque):
        of_numpy = type(leaf).__module__.partition(".")[0] == "numpy"
        raise UserError(
            f"a {'numpy array' if of_numpy else kind} is not split; give torch.from_numpy(...) or another "
            "tensor, or Whole(...) for what all replicas share"
        )
    if isinstance(leaf, nn.Module) or any(
        isinstance(each, Tensor) for held in held_by(leaf) for each in leaves(held)
    ):
        raise UserError(
            f"a {kind} carries tensors that cannot be split; give them as arguments, in a tuple, list, dict "
            "or dataclass, or wrap what all replicas share in Whole(...)"
        )


def held_by(value: Any) -> Iterator[object]:
    """Yield what an object holds directly: attributes, slots, and the items of a set or mapping."""
    if isinstance(value, type | types.ModuleType):
        return
    slots = (slot for kind in type(value).__mro__ for slot in vars(kind).get("__slots__", ()))
    yield from (getattr(value, slot, None) for slot in slots)
    if isinstance(value, AnySet) or (isinstance(value, Mapping) and not isinstance(value, dict)):
        yield from value.values() if isinstance(value, Mapping) else value
    yield from getattr(value, "__dict__", {}).values()
