"""Functions that torch.compile leaves to Python."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_of_graphs(method: Method) -> Method:
    """Decorate a method so that torch.compile breaks its graph there and leaves it, with all that it calls,
    to Python.

    `torch.compiler.disable` does the same, but imports the compiler at once (seconds) and costs microseconds
    a call; this asks one question.
    """
    left_to_python = torch._disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return left_to_python(*args, **kwargs)
        return method(*args, **kwargs)

    return call  # type: ignore[return-value]
