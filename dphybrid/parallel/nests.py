"""Nested values (tuples, lists, dicts, dataclasses): walks and rebuilds them, counts their rows, and refuses
contents that cannot be split."""

import copy
import dataclasses
import gc
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

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
        raise AttributeError(
            f"{name}: these rows are on their devices already, in parts, and only a region takes them; call "
            f"{name} inside the region's module"
        )

    @classmethod
    def __torch_function__(cls, function: Callable[..., object], *_: object) -> None:
        # torch functions and layers call this for an argument that has it. Without it, their error would only
        # name this class and not say what to do.
        cls(()).__getattr__(function.__name__)


def _refusing(operator: str) -> Callable[..., None]:
    def refuse(self: Parts, *_: object) -> None:
        try:
            self.__getattr__(operator)
        except AttributeError as error:
            raise UserError(str(error)) from None

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


def is_nest(value: object) -> bool:
    """Return whether a value is a container whose items can be walked."""
    if isinstance(value, tuple | list | dict | UserDict):
        return not isinstance(value, PackedSequence)
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Whole | Parts)


def items_of(value: object) -> dict[Any, object]:
    """Return a nest's items by key, index or attribute name."""
    if isinstance(value, dict | UserDict):
        # Not dict(value), which calls value[key]: a subclass may return something else than it holds.
        return dict(value.items())
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    # All attributes of a dataclass, including those that __post_init__ set in addition to the fields.
    return {name: getattr(value, name) for name in (*_filled_slots(value), *getattr(value, "__dict__", {}))}


def rebuild(like: object, items: list[object]) -> object:
    """Return a nest of the same type as `like` with other items. Attributes that refer to an old item refer
    to the new one. No constructor runs: a `__post_init__` would compute from a share what it computed from
    the batch."""
    if type(like) is dict:  # dict and list first: by far the most common
        return dict(zip(like, items, strict=True))
    if type(like) is list:
        return items
    if isinstance(like, tuple):
        if not hasattr(like, "__dict__"):
            return like._make(items) if hasattr(like, "_make") else type(like)(items)
        new: Any = tuple.__new__(type(like), items)
    else:
        new = copy.copy(like)
    if isinstance(like, list):
        new[:] = items
    elif isinstance(like, dict | UserDict):
        for name, item in zip(like, items, strict=True):
            new[name] = item
    elif not isinstance(like, tuple):
        for name, item in zip(items_of(like), items, strict=True):
            object.__setattr__(new, name, item)
        return new
    if getattr(like, "__dict__", None) is like:  # a dict whose `__dict__` is the dict itself
        object.__setattr__(new, "__dict__", new)
        return new
    # Model outputs of Hugging Face, for one, hold each item under its key and again as an attribute.
    mirrored = {id(old): item for old, item in zip(items_of(like).values(), items, strict=True)}
    for name, held in getattr(like, "__dict__", {}).items():
        if not (isinstance(like, UserDict) and name == "data"):
            object.__setattr__(new, name, mirrored.get(id(held), held))
    return new


def map_leaves(function: Callable[[object], object], value: object) -> Any:
    """Return the nest with `function` applied to every value in it that is not a nest itself."""
    if is_nest(value):
        return rebuild(value, [map_leaves(function, item) for item in items_of(value).values()])
    return function(value)


def joined(value: object, device: torch.device, dim: int) -> Any:
    """Return the nest with each `Parts` joined to one tensor on `device`."""
    return map_leaves(lambda leaf: leaf.joined(device, dim) if isinstance(leaf, Parts) else leaf, value)


def map_tensors(function: Callable[[Tensor], object], value: object) -> Any:
    """Return the nest with `function` applied to every tensor, and each `Whole` replaced by its value. Raises
    UserError for `Parts`."""

    def leaf(value: object) -> object:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, Whole):
            return map_tensors(function, value.value)
        if isinstance(value, Parts):
            raise UserError(
                f"{len(value.tensors)} parts for a region with one device; place the table on this region's "
                "devices"
            )
        return value

    return map_leaves(leaf, value)


def is_marked(value: object) -> bool:
    """Return whether a nest contains a `Whole` or `Parts`."""
    if isinstance(value, Whole | Parts):
        return True
    return is_nest(value) and any(map(is_marked, items_of(value).values()))


def tensors_of(value: object, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a nest with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif is_nest(value):
        for name, item in items_of(value).items():
            yield from tensors_of(item, f"{path}[{name!r}]")


def _named_inputs(args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """Return the arguments under the names used in messages: `input 0`, or the keyword."""
    return {f"input {index}": value for index, value in enumerate(args)} | kwargs


def input_tensors(args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Yield (path used in messages, tensor) for every tensor of a call's arguments."""
    for name, value in _named_inputs(args, kwargs).items():
        yield from tensors_of(value, name)


def batch_rows(args: tuple[object, ...], kwargs: dict[str, object], dim: int) -> dict[str, int]:
    """Return path -> number of rows on `dim`, which is equal for all tensors. 0-dim tensors are left out;
    every replica gets them.

    Raises UserError with all sizes if they disagree (torch would silently drop the rows beyond the smallest),
    and for values that contain tensors or data but cannot be split.
    """
    sizes: dict[str, int | None] = {}
    for name, value in _named_inputs(args, kwargs).items():
        _collect_sizes(value, dim, name, sizes)
    found = {path: size for path, size in sizes.items() if size is not None}
    if len(found) < len(sizes) or len(set(found.values())) > 1:
        listed = ", ".join(
            f"{path}: {f'no dim {dim}' if size is None else size}" for path, size in sizes.items()
        )
        raise UserError(
            f"tensors disagree on their rows (dim {dim}): {listed}; give each one row per sample, or wrap "
            "what all replicas share in Whole(...)"
        )
    return found


def _num_rows(value: Tensor, dim: int, path: str) -> int | None:
    if value.is_nested or value.layout not in (torch.strided, torch.sparse_coo):
        kind = "nested (jagged)" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise UserError(
            f"{path}: a {kind} tensor cannot be split; give a padded tensor, one in COO layout, or values "
            "and offsets for each sample"
        )
    if value.is_sparse and value.requires_grad:
        raise UserError(
            f"{path}: a sparse tensor that requires grad cannot be split (torch has no backward for it); "
            "give its indices and values as separate inputs"
        )
    return value.shape[dim] if -value.dim() <= dim < value.dim() else None


def _collect_sizes(value: object, dim: int, path: str, sizes: dict[str, int | None]) -> None:
    if isinstance(value, Tensor):
        if value.dim():
            sizes[path] = _num_rows(value, dim, path)
    elif isinstance(value, Parts):
        sizes[path] = sum(part.shape[dim] for part in value.tensors)
    elif is_nest(value):
        refuse_attributes(value, path)
        for name, item in items_of(value).items():
            _collect_sizes(item, dim, f"{path}[{name!r}]", sizes)
    elif type(value) not in PLAIN and not isinstance(value, Whole):
        _refuse_unsplittable(value, path)


PLAIN: frozenset[type] = frozenset(
    (types.NoneType, bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device)
)
"""Types whose values neither are nor contain tensors."""


def _refuse_unsplittable(value: Any, path: str) -> None:
    """Raise UserError for a value of an unknown kind that holds the batch, so that every replica would get
    all of it, or that can be read only once."""
    kind = type(value).__name__
    if isinstance(value, PackedSequence):
        raise UserError(
            f"{path}: a PackedSequence has no batch dim to split on; give the padded batch and its lengths, "
            "and pack inside the module"
        )
    if isinstance(value, Iterator):
        raise UserError(
            f"{path}: a {kind} can be read only once, by the first replica; give a list or a tensor"
        )
    if type(value).__module__.split(".")[0] == "numpy" and vars(type(value)).get("ndim") and value.ndim:
        raise UserError(
            f"{path}: a numpy array is not split; give torch.from_numpy(...), or Whole(...) for what all "
            "replicas share"
        )
    if _carries_tensors(value):
        raise UserError(
            f"{path}: a {kind} carries tensors that cannot be split; give them as arguments, in a tuple, "
            "list, dict or dataclass, or wrap what all replicas share in Whole(...)"
        )


def refuse_attributes(value: object, path: str) -> None:
    """Raise UserError for an instance of a container's subclass with an attribute that holds tensors which
    are not items."""
    if type(value) in (tuple, list, dict) or not isinstance(value, tuple | list | dict | UserDict):
        return  # a dataclass's attributes are its items
    inside = {id(item) for item in items_of(value).values()}
    for name, held in getattr(value, "__dict__", {}).items():
        if id(held) in inside or (isinstance(value, UserDict) and name == "data"):
            continue
        if _carries_tensors(held):
            raise UserError(
                f"{path}: {type_text(value)} carries a tensor beside its items (.{name}); give it as an item "
                "or an argument"
            )


_DEPTH = 8
"""How many references deep `reachable` follows objects: without a limit it might walk most of the process."""


def reachable(value: object, but_not_in: type | tuple[type, ...] = ()) -> Iterator[object]:
    """Yield the value and all objects that it refers to, directly or not, nearest first. but_not_in: types
    whose references are not followed."""
    found, seen = [value], set[int]()
    for _ in range(_DEPTH):
        yield from found
        seen.update(map(id, found))
        within = (each for each in found if not isinstance(each, but_not_in))
        found = [held for each in within for held in _referents(each) if id(held) not in seen]


def _carries_tensors(value: object) -> bool:
    return any(isinstance(each, Tensor) for each in reachable(value))


def _referents(value: object) -> Sequence[object]:
    """Return the objects that an object refers to directly, in any way (attributes, items, closures)."""
    if type(value) in PLAIN or isinstance(value, type | types.ModuleType):
        return ()
    if isinstance(value, types.FunctionType):  # get_referents would add its module's globals
        return value.__closure__ or ()
    return gc.get_referents(value)


def _filled_slots(value: object) -> list[str]:
    # Slots are not in __dict__, and each class of the hierarchy lists only its own.
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return [name for name in slots if not name.startswith("__") and hasattr(value, name)]
