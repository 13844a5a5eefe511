"""The optimizer of the dense blocks, and the course of both learning rates."""

import math
from typing import Any

import torch
from torch import nn

from dphybrid.config import TrainConfig
from dphybrid.embedding import dense_parameters
from dphybrid.training.memory import out_of_memory_report
from dphybrid.training.session import Session
from dphybrid.util.errors import UserError
from dphybrid.util.out_of_memory import is_out_of_memory


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
    optimizer: torch.optim.Optimizer = kinds[config.optimizer](
        groups, lr=config.lr, weight_decay=config.weight_decay
    )
    return optimizer


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
    before = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, (lr, weight_decay) in zip(optimizer.param_groups, before, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay
    for parameter in parameters:
        parameter.grad = None
        if isinstance(step := optimizer.state[parameter].get("step"), torch.Tensor):
            step.zero_()


def set_learning_rates(session: Session, done: float) -> None:
    """Set the learning rates of blocks and rows when the share `done` (0..1) of all steps is behind us."""
    factor = learning_rate_factor(session.config.train.schedule, done)
    if session.trained.dense is not None:
        for group in session.trained.dense.param_groups:
            group["lr"] = session.config.train.lr * factor
    if session.trained.rows is not None:
        session.trained.rows.lr = session.config.table.lr * factor
