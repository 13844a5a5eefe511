"""Inputs that a module changes in place, seen by the versions that torch counts: on several devices the
caller's tensor would stay as it is, so what did not happen at the first call is refused on one device, too.
"""

from typing import Any

from torch import Tensor

from dphybrid.parallel.nests import PLAIN, Whole, map_tensors, named_inputs, tensors_of
from dphybrid.util.errors import UserError


def all_tensors(value: Any, found: list[Tensor]) -> bool:
    """Add all tensors of a nest to `found`: `tensors_of` without the paths, for every call. Return whether
    they are all that there is: nothing to open, such as a `Whole`."""
    kind = type(value)
    if kind is tuple or kind is list or kind is dict:
        plain = True
        for item in value.values() if kind is dict else value:
            if type(item) is Tensor:
                found.append(item)
            elif not all_tensors(item, found):
                plain = False
        return plain
    if kind in PLAIN:
        return True
    found += [tensor for _, tensor in tensors_of(value.value if kind is Whole else value)]
    return False


def versions(tensors: list[Tensor]) -> list[int | None]:
    """Return how often each tensor was changed in place; None for inference tensors, which do not count."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def refuse_changes(inputs: object, given: list[Tensor], before: list[int | None]) -> None:
    """Raise UserError that names the changed one of the tensors `given` of (args, kwargs). before: their
    versions."""
    now = versions(given)
    changed = {id(tensor) for tensor, one, two in zip(given, before, now, strict=True) if one != two}
    opened = named_inputs(*map_tensors(lambda t: t, inputs))
    path = next(p for name, value in opened.items() for p, t in tensors_of(value, name) if id(t) in changed)
    raise UserError(
        f"DataParallel: the module has changed {path} in place, which it did not at its first call; on "
        "several devices the caller's tensor stays as it is: clone it first in forward, or do not work in "
        "place"
    )
