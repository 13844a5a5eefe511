"""A moving average of the blocks' weights, which is evaluated and kept.

It is a state of the blocks' optimizer, so that checkpoints hold it and a resumed run goes on with it. Where a
model is evaluated or written, weights and average change places: a checkpoint's blocks are the averaged ones,
which prediction loads, and its optimizer state has the weights that training goes on with.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AVERAGE, STEPS = "average", "averaged_steps"


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Average the parameters after each step: average = d * average + (1 - d) * parameter.

    d rises to `decay` with the steps k as (1 + k) / (10 + k), so that a short training is not held back by
    its first weights. A parameter without a gradient waits.
    """

    def follow(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            parameters = [p.detach() for p in group["params"] if p.grad is not None]
            states = [optimizer.state[p] for p in group["params"] if p.grad is not None]
            averages = [
                state.setdefault(_AVERAGE, p.clone()) for state, p in zip(states, parameters, strict=True)
            ]
            steps = group[STEPS] = group.get(STEPS, 0) + 1
            if averages:
                torch._foreach_lerp_(averages, parameters, 1 - min(decay, (1 + steps) / (10 + steps)))

    optimizer.register_step_post_hook(follow)


@torch.no_grad()
def swap(optimizer: torch.optim.Optimizer | None) -> None:
    """Let weights and averages change places, in place."""
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        if _AVERAGE in state:
            weight = parameter.clone()
            parameter.copy_(state[_AVERAGE])
            state[_AVERAGE].copy_(weight)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Have the averages in the place of the weights; a no-op for an optimizer that keeps none."""
    swap(optimizer)
    try:
        yield
    finally:
        swap(optimizer)
