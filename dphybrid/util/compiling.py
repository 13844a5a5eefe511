"""Graph breaks for torch.compile, transforms of torch.func, optimizers that do not import the compiler, and
profiler labels."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad, profiler
from torch.optim import Optimizer
from torch.profiler import record_function

_Method = TypeVar("_Method", bound=Callable[..., Any])


def outside_of_graphs(method: _Method) -> _Method:
    """Decorate a method so that torch.compile breaks its graph there and runs the method, with everything it
    calls, in plain Python.

    `torch.compiler.disable` does the same, but imports the compiler at once (seconds) and costs microseconds
    for each call; this decorator makes one check.
    """
    left_to_python = torch._disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return left_to_python(*args, **kwargs)
        return method(*args, **kwargs)

    return call  # type: ignore[return-value]


class EagerOptimizer(Optimizer):
    """torch's base class without the wrappers that import torch.compile at their first call."""

    # torch decorates these methods with `_disable_dynamo`; unwrap takes the decorators off.
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


def eager(kind: type[Optimizer]) -> type[Optimizer]:
    """Return a subclass of torch's optimizer `kind` that does not import torch.compile, which takes 1.7 to
    2.2 CPU seconds of each process: half of a short training."""
    # torch wraps `step` in code that imports the compiler. The wrapper also sets no_grad, so set it here.
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (EagerOptimizer, kind), {"step": step})


def is_transformed() -> bool:
    """Return whether a transform of torch.func or a forward-mode derivative is being computed.

    Both need torch's own operations instead of an autograd function, and other threads do not see them."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def profiler_looks_on() -> bool:
    """Return whether torch's profiler is running."""
    # Not torch.autograd._profiler_enabled(): it is False for a profile of all threads.
    return bool(profiler._is_profiler_enabled)


def labelled(name: str) -> AbstractContextManager[object]:
    """Return a context that labels its block in a profile. Costs a few microseconds, with or without one."""
    return record_function(f"dphybrid/{name}")
