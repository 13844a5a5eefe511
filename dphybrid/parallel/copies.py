"""Copies of modules that train and keep state of their own, and what a module keeps from call to call."""

import copy
import math
import types
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AnySet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dphybrid.parallel.check import OF_TORCH, reached
from dphybrid.parallel.nests import PLAIN, held_by
from dphybrid.parallel.scattering import is_table

Key = tuple[str, str]
"""(name of a part of a module, `self.` and the attribute)."""


def copied_module(module: nn.Module, outside: dict[int, Any]) -> nn.Module:
    """Return a copy with parameters, buffers and attributes of its own, in which BatchNorm uses its running
    statistics. Tables in host memory are shared. outside: `itself` of the model around the module, which is
    not copied."""
    parts = own_parts(module)
    memo = outside | {id(part): type(part).__new__(type(part)) for part in parts}
    memo |= {id(parameter): copy.deepcopy(parameter) for part in parts for parameter in _parameters_of(part)}
    for table in filter(is_table, module.modules()):
        memo |= itself(table)
    for part in parts:
        made, held = memo[id(part)], vars(part)
        vars(made).update((name, _copied(held[name], name, memo)) for name in held)
        if isinstance(made, _BatchNorm) and made.track_running_stats:
            made.training = False
    return memo[id(module)]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """While the block runs, the model has copies of its buffers and attributes, and no gradients; afterwards
    all are as before, parameters too. Tables in host memory are left alone: their forward changes nothing."""
    parts = own_parts(model)
    before = [(part, dict(vars(part))) for part in parts]
    own = {parameter for part in parts for parameter in _parameters_of(part)}
    values = [(each, each.grad, each.data, each.detach().clone()) for each in own]
    known = {id(parameter) for parameter in own}
    grads = [(weight, weight.grad) for weight in model.parameters() if id(weight) not in known]
    memo = itself(model)
    try:
        for parameter in own:
            parameter.grad = None
        for part, held in before:
            vars(part).update((name, _copied(held[name], name, memo)) for name in held)
        yield
    finally:
        for part, held in before:
            vars(part).clear()
            vars(part).update(held)
        for weight, grad in grads:
            weight.grad = grad
        for parameter, grad, data, value in values:
            parameter.grad = grad
            if not same(parameter, value):
                parameter.data = data.copy_(value)


def own_parts(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module, itself first, but its tables."""
    return [part for part in module.modules() if not is_table(part)]


def _parameters_of(part: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in part._parameters.values() if parameter is not None]


def itself(module: nn.Module) -> dict[int, Any]:
    """Return a memo of copying that leaves the module's parts and parameters as they are."""
    return {id(each): each for each in (*module.modules(), *module.parameters())}


def _copied(value: Any, name: str, memo: dict[int, Any]) -> Any:
    """Return a copy of the attribute of a module that has this name."""
    if name in ("_parameters", "_buffers", "_modules"):
        return {key: copied(each, memo) for key, each in value.items()}
    # The hooks themselves are shared, but not the dicts that hold them.
    return copy.copy(value) if name in OF_TORCH else copied(value, memo)


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy. What cannot be copied, such as a lock, is returned as it is."""
    if type(value) in PLAIN or getattr(getattr(value, "flags", None), "writeable", True) is False:
        return value  # arrays that cannot be written may be huge
    for each in reached(value):
        if isinstance(each, Tensor) and id(each) not in memo:  # deepcopy refuses those with a graph
            memo[id(each)] = each.detach().clone().requires_grad_(each.is_leaf and each.requires_grad)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 # any class may refuse in a way of its own
        return value


def state_of(module: nn.Module) -> dict[Key, Any]:
    """Return what a forward may write: parameters, buffers, attributes, and the classes of submodules."""
    return {
        (name, f"self.{key}"): value
        for name, part in module.named_modules()
        if not is_table(part)
        for key, value in (
            part._parameters
            | part._buffers
            | {key: type(child) for key, child in part._modules.items()}
            | {key: value for key, value in vars(part).items() if key not in OF_TORCH}
        ).items()
    }


def same(one: Any, two: Any, tolerance: float = 0.0, seen: set[tuple[int, int]] | None = None) -> bool:
    """Return whether two values are the same, also those that containers, objects and modules hold.

    tolerance: of numbers, relative to the largest of their tensor. What can be neither compared nor opened,
    such as a generator or a function, is the same.
    """
    seen = set() if seen is None else seen
    if one is two or (id(one), id(two)) in seen:
        return True
    seen.add((id(one), id(two)))
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return _close(one.detach(), two.detach(), tolerance)
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return one == two or math.isclose(one, two, rel_tol=tolerance) or one != one != two != two
    if isinstance(one, AnySet):  # what it holds may be equal only to itself
        return {each for each in one if type(each) in PLAIN} == {each for each in two if type(each) in PLAIN}
    if type(one) in PLAIN or isinstance(one, type | bytearray):
        return bool(one == two)
    if hasattr(one, "tobytes"):  # arrays of numpy and of Python
        return bool(one.tobytes() == two.tobytes())
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(same(one[key], two[key], tolerance, seen) for key in one)
    if not isinstance(one, list | tuple | deque):
        if isinstance(one, types.FunctionType | types.MethodType | types.ModuleType):
            return True
        one, two = list(held_by(one)), list(held_by(two))
    return len(one) == len(two) and all(same(a, b, tolerance, seen) for a, b in zip(one, two, strict=True))


def _close(one: Tensor, two: Tensor, tolerance: float) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.layout is not torch.strided or two.layout is not torch.strided:
        one, two = one.to_dense(), two.to_dense()
    if torch.equal(one, two) or not one.is_floating_point():
        return torch.equal(one, two)
    largest = one.abs().nan_to_num(0.0, 0.0, 0.0).max()
    return torch.allclose(one, two, rtol=0.0, atol=tolerance * float(largest), equal_nan=True)
