"""The optimizer of the dense blocks, the moving average of their weights, and the learning-rate schedule.

The average is kept in the state of the blocks' optimizer, so checkpoints hold it and a resumed run continues
it. While a model is evaluated or saved, weights and average are swapped: the blocks of a checkpoint are the
averaged ones, which prediction loads; its optimizer state has the weights with which training continues.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dphybrid.config import TrainConfig
from dphybrid.embedding import CombinedOptimizer, dense_parameters, find_tables
from dphybrid.util.compiling import eager
from dphybrid.util.errors import UserError

_AVERAGE, _AVERAGED_STEPS = "average", "averaged_steps"


def learning_rate_factor(schedule: str, done: float, warm_up: float = 0.0) -> float:
    """Return the factor on the learning rates. done: share of all steps taken before this one, 0..1. warm_up:
    share of the steps in which it rises to the schedule's value."""
    if done < warm_up:
        return learning_rate_factor(schedule, done) * max(0.01, done / warm_up)
    # Not 0, with which the last steps would take time and train nothing.
    floor = 0.01
    if schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    if schedule == "linear":
        return 1 - (1 - floor) * min(done, 1.0)
    return 1.0


def make_dense_optimizer(
    model: nn.Module, config: TrainConfig, decay_of: Callable[[nn.Parameter], float] = lambda _: 1.0
) -> torch.optim.Optimizer | None:
    """Return the optimizer of the dense blocks, or None for a model without dense parameters. decay_of: a
    parameter's weight decay as a share of `config.weight_decay`. There is one parameter group for each device
    type and share."""
    by_type: dict[tuple[str, float], list[nn.Parameter]] = {}
    for parameter in dense_parameters(model):
        if parameter.requires_grad:
            key = parameter.device.type, decay_of(parameter)
            by_type.setdefault(key, []).append(parameter)
    if not by_type:
        return None
    # A group that mixes device types loses torch's multi-tensor path. On the CPU, `fused` (one pass over
    # memory) saves a sixth of a small step.
    fused = {"cpu": {"fused": True}} if config.optimizer in ("adam", "adamw") else {}
    groups = [
        {"params": parameters, "weight_decay": share * config.weight_decay, **fused.get(kind, {})}
        for (kind, share), parameters in by_type.items()
    ]
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer: Any = eager(kinds[config.optimizer])
    return optimizer(groups, lr=config.lr, weight_decay=config.weight_decay)


def combined(
    blocks: Mapping[str, torch.optim.Optimizer], model: nn.Module, where: str
) -> torch.optim.Optimizer | None:
    """Combine a recipe's optimizers of the dense parameters into one. Raises UserError if a parameter belongs
    to none of them or to several, and if one has a table or the name of the tables' optimizer. where: start
    of its message."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    uses = Counter(id(p) for one in blocks.values() for group in one.param_groups for p in group["params"])
    for parameter in dense_parameters(model):
        if parameter.requires_grad and uses[id(parameter)] != 1:
            raise UserError(
                f"{where}: optimizers() gives parameter {names[id(parameter)]} to {uses[id(parameter)]} "
                "optimizers; give it to one, or freeze it with requires_grad_(False)"
            )
    if tables := [name for name, table in find_tables(model).items() if uses[id(table.weight)]]:
        raise UserError(
            f"{where}: optimizers() has table {tables[0]}, which would be updated twice in each step, as the "
            "tables have an optimizer of their own; give yours dphybrid.embedding.dense_parameters(model)"
        )
    if "rows" in blocks:
        raise UserError(
            f"{where}: optimizers() calls one `rows`, as the tables' own optimizer is called; choose another "
            "name"
        )
    several = list(blocks.values())
    return CombinedOptimizer(*several) if len(several) > 1 else several[0] if several else None


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Average the parameters after each step: average = d * average + (1 - d) * parameter.

    After k steps, d is the smaller of `decay` and (1 + k) / (10 + k), so that the first weights do not
    dominate a short training. A parameter without a gradient keeps its average.
    """

    def update_average(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            parameters = [p.detach() for p in group["params"] if p.grad is not None]
            states = [optimizer.state[p] for p in group["params"] if p.grad is not None]
            for state, parameter in zip(states, parameters, strict=True):
                if _AVERAGE not in state:
                    state[_AVERAGE] = parameter.clone()
            averages = [state[_AVERAGE] for state in states]
            steps = group[_AVERAGED_STEPS] = group.get(_AVERAGED_STEPS, 0) + 1
            if averages:
                # One call for all parameters, as torch's multi-tensor optimizers make it.
                torch._foreach_lerp_(averages, parameters, 1 - min(decay, (1 + steps) / (10 + steps)))

    optimizer.register_step_post_hook(update_average)


@torch.no_grad()
def swap_average(optimizer: torch.optim.Optimizer | None) -> None:
    """Swap weights and averages, in place."""
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        if _AVERAGE in state:
            weight = parameter.clone()
            parameter.copy_(state[_AVERAGE])
            state[_AVERAGE].copy_(weight)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """While the block runs, replace the weights by their averages. Does nothing if no average is kept."""
    swap_average(optimizer)
    try:
        yield
    finally:
        swap_average(optimizer)
