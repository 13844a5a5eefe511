"""The optimizer of the dense blocks, and the course of both learning rates."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dphybrid.config import TrainConfig
from dphybrid.embedding import CombinedOptimizer, dense_parameters
from dphybrid.training.engine import Session
from dphybrid.training.memory import out_of_memory_report
from dphybrid.util.compiling import eager
from dphybrid.util.errors import UserError
from dphybrid.util.memory import is_out_of_memory


def learning_rate_factor(schedule: str, done: float) -> float:
    """Return the factor on the learning rates when the share `done` (0..1) of all steps is behind us."""
    floor = 0.01
    if schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    if schedule == "linear":
        return 1 - (1 - floor) * min(done, 1.0)
    return 1.0


def make_dense_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer | None:
    """Return the optimizer of the dense blocks, or None for a model without dense parameters. One group a
    device type."""
    by_type: dict[str, list[nn.Parameter]] = {}
    for parameter in dense_parameters(model):
        if parameter.requires_grad:
            by_type.setdefault(parameter.device.type, []).append(parameter)
    if not by_type:
        return None
    # A group that mixes devices loses torch's multi-tensor path for all of them. On the CPU one pass over
    # memory saves a sixth of a small step.
    fused = {"cpu": {"fused": True}} if config.optimizer in ("adam", "adamw") else {}
    groups = [{"params": parameters, **fused.get(kind, {})} for kind, parameters in by_type.items()]
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer: Any = eager(kinds[config.optimizer])
    return optimizer(groups, lr=config.lr, weight_decay=config.weight_decay)


def combined(
    blocks: Mapping[str, torch.optim.Optimizer], model: nn.Module, where: str
) -> torch.optim.Optimizer | None:
    """Return a recipe's optimizers of the dense parameters as one. Raises UserError, after `where`, for a
    parameter that none of them has, or several have."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    there = Counter(id(p) for one in blocks.values() for group in one.param_groups for p in group["params"])
    for parameter in dense_parameters(model):
        if parameter.requires_grad and there[id(parameter)] != 1:
            raise UserError(
                f"{where}: optimizers() gives parameter {names[id(parameter)]} to {there[id(parameter)]} "
                "optimizers; give it to one, or freeze it with requires_grad_(False)"
            )
    several = list(blocks.values())
    return CombinedOptimizer(*several) if len(several) > 1 else several[0] if several else None


def make_states(optimizer: torch.optim.Optimizer, batch_size: int, model: nn.Module) -> None:
    """Give a new optimizer the states that its first step would make. Raises UserError with the report when
    they do not fit: in the middle of an update nothing could be mended."""
    try:
        _take_empty_step(optimizer)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        report = out_of_memory_report(error, 1, batch_size, model, optimizer)
        raise UserError(
            f"{report}\nand that before the first step: weights, gradients and optimizer state alone are too "
            "much; lower the model's sizes or take train.optimizer=sgd"
        ) from error


@torch.no_grad()
def _take_empty_step(optimizer: torch.optim.Optimizer) -> None:
    """One step with a learning rate, decay and gradients of zero, which changes no parameter and is not
    counted."""
    stilled = ("lr", "weight_decay")
    before = [{key: group[key] for key in stilled if key in group} for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(dict.fromkeys(values, 0.0))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    for parameter in parameters:
        parameter.grad = None
        if isinstance(step := optimizer.state[parameter].get("step"), torch.Tensor):
            step.zero_()


def set_learning_rates(session: Session, done: float) -> None:
    """Set the learning rates of blocks and rows when the share `done` (0..1) of all steps is behind us."""
    factor = learning_rate_factor(session.config.train.schedule, done)
    if session.trained.dense is not None:
        groups = session.trained.dense.param_groups
        for group, rate in zip(groups, session.trained.rates, strict=True):
            group["lr"] = rate * factor
    if session.trained.rows is not None:
        session.trained.rows.lr = session.config.table.lr * factor
