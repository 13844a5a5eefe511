"""Keeps random numbers out of the comparison of a split: replaces torch's random draws by their expected
values, and gives random generators back as they were."""

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def own_random_state(home: torch.device, seed: int | None = None) -> Iterator[None]:
    """Return a context that restores the random generators afterwards: torch's of the CPU and of `home`,
    Python's, and numpy's if it is loaded. seed: of all of them in the context."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng([home] if home.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


class ExpectedValues(TorchDispatchMode):
    """Replaces torch's random draws by values that do not depend on the number of rows: dropout keeps
    everything, uniform draws give the middle, a permutation rotates by one. eps: of the coarsest
    floating-point type that an operation has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _expected(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result


# Subclasses get a wrapper there that imports the compiler at the first call, 1.5 CPU seconds of each process.
ExpectedValues.__torch_dispatch__ = inspect.unwrap(  # type: ignore[method-assign]
    ExpectedValues.__torch_dispatch__
)


def _expected(func: Any, args: Any, kwargs: Any) -> Any:
    name, names = func.overloadpacket.__name__, [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if name.startswith("rrelu"):  # the noise is the slope of each value, which backward reads
        slope = (given.get("lower", 0.125) + given.get("upper", 1 / 3)) / 2
        given["noise"].copy_(torch.where(args[0] > 0, 1.0, slope))
        return args[0].mul_(given["noise"]) if name.endswith("_") else args[0] * given["noise"]
    for key, off in (("dropout_p", 0.0), ("dropout", 0.0), ("training", False)):
        if key in given:
            return func(**(given | {key: off}))
    value = _VALUES[name](given) if name in _VALUES else None
    if value is None:  # compared nevertheless: then whether it differs from call to call is looked for
        return func(*args, **kwargs)
    result = args[0] if name.endswith("_") else func(*args, **kwargs)
    return result.copy_(value) if isinstance(value, torch.Tensor) else result.fill_(value)


_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like"), lambda _: 0.5),
    **dict.fromkeys(("exponential_", "geometric_", "log_normal_", "cauchy_"), lambda _: 1.0),
    **dict.fromkeys(("normal", "normal_"), lambda of: of.get("mean", 0.0) + 0.5 * of.get("std", 1.0)),
    **dict.fromkeys(("randint", "randint_like"), lambda of: of.get("low", 0)),
    **dict.fromkeys(("poisson", "_standard_gamma"), lambda of: of["self"]),
    "bernoulli": lambda of: of.get("p", of["self"]),
    "bernoulli_": lambda of: of.get("p", 0.5),
    "uniform_": lambda of: (of.get("from", 0.0) + of.get("to", 1.0)) / 2,
    "binomial": lambda of: (of["count"] * of["prob"]).round(),
    "_sample_dirichlet": lambda of: of["self"] / of["self"].sum(-1, keepdim=True),
    "random_": lambda of: of.get("from") or 0,
    "randperm": lambda of: torch.arange(of["n"], device="cpu").roll(-1),
    "multinomial": lambda of: (
        of["self"].argmax(-1, keepdim=True).expand(*of["self"].shape[:-1], of["num_samples"])
    ),
}
"""Name of a random operation -> function from its arguments to the value that replaces its result."""
