"""Checks that loss, gradients and weights are finite, so that NaN or inf never reach the weights or a
checkpoint."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.embedding import find_tables
from dphybrid.embedding.gradients import segment_of
from dphybrid.embedding.table import is_dense
from dphybrid.embedding.weights import all_rows
from dphybrid.training.checkpoint import how_to_continue
from dphybrid.util.errors import UserError

Rows = tuple[str, Any, Tensor | None]
"""(name, rows, row numbers) of a tensor. Row numbers None: the tensor holds all rows."""

_BLOCK = 2**18  # entries checked at once: bounds the memory of the masks


def gradient_sum(parameters: Iterable[Tensor]) -> float:
    """Return the sum of all gradients. If it is finite, so is each gradient; the sum of finite gradients may
    still overflow."""
    sums: dict[torch.device, list[Tensor]] = {}
    for grad in (parameter.grad for parameter in parameters):
        if grad is not None:
            values = grad._values() if grad.is_sparse else grad
            sums.setdefault(values.device, []).append(values.sum().double())
    # One float() for each device: each makes the host wait for that device.
    return sum(float(torch.stack(parts).sum()) for parts in sums.values())


def not_finite(model: nn.Module, batch: Mapping[str, Tensor], loss: Tensor, clipped: bool) -> str:
    """Return the first tensor that is NaN or infinite after the backward of a step, in the order of
    computation, such as "table words row 5 is nan", or "" when everything is finite.

    clipped: whether gradients were scaled by their norm, which may be infinite although each one is finite.
    """
    tables, parameters = find_tables(model), _parameters(model)
    gradients = {n: segment_of(t.weight)[:2] for n, t in tables.items() if t.weight.grad is not None}
    problem = _first_problem(
        [
            *((f"the batch's {name}", value, None) for name, value in batch.items()),
            *(
                (f"table {name}", all_rows(tables[name].weight)[ids], ids)
                for name, (ids, _) in gradients.items()
            ),
            *parameters,
            ("the loss", loss, None),
            *((f"the gradient of table {name}", grads, ids) for name, (ids, grads) in gradients.items()),
            *((f"the gradient of {name}", weight.grad, None) for name, weight, _ in parameters),
        ]
    )
    norm = "the gradients' norm is infinite, although each of them is finite" if clipped else ""
    return " is ".join(problem) or norm


def check_finite(
    model: nn.Module, dense: torch.optim.Optimizer | None, rows: Iterable[Rows], step: int, checkpoints: Path
) -> None:
    """Raise UserError when a weight or an optimizer state is NaN or infinite. It names the step and the
    parameter or table row. Costs one pass over the tensors.

    rows: the rows of tables and of their states that may have changed. checkpoints: folder of the earlier
    checkpoints; the message names the last one.
    """
    if problem := _first_problem(chain(rows, _blocks(model), _states(model, dense))):
        raise UserError(
            f"{problem[0]} is not a finite number at step {step}, so no checkpoint was written; lower "
            f"train.lr or table.lr, or set train.clip_norm, and {how_to_continue(checkpoints)}"
        )


def _parameters(model: nn.Module) -> list[Rows]:
    """Return the dense parameters by name: all except the tables' weights."""
    dense = is_dense(model)
    return [(f"parameter {name}", value, None) for name, value in model.named_parameters() if dense(value)]


def _blocks(model: nn.Module) -> Iterator[Rows]:
    """Yield the dense parameters and the buffers by name."""
    yield from _parameters(model)
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer.masked_fill(buffer.isinf(), 0), None  # masks are infinite


def _states(model: nn.Module, dense: torch.optim.Optimizer | None) -> Iterator[Rows]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for weight, states in (dense.state if dense is not None else {}).items():
        for key, state in states.items():
            if isinstance(state, Tensor):
                yield f"optimizer's {key} of {names.get(weight, 'a parameter')}", state, None


def _first_problem(tensors: Iterable[Rows]) -> tuple[str, ...]:
    """Return (name and row, value) of the first entry that is NaN or infinite, or ()."""
    for name, tensor, ids_U in tensors:
        if tensor is None:
            continue
        # A table spread over several processes is no Tensor: each process checks its own rows.
        bad = first_bad(tensor) if isinstance(tensor, Tensor) else tensor.first_bad()
        if bad is not None:
            row = bad[0] if ids_U is None else int(ids_U[bad[0]])
            return f"{name}{f' row {row}' if tensor.shape else ''}", str(bad[1])
    return ()


def first_bad(tensor: Tensor) -> tuple[int, float] | None:
    """Return row and value of the first entry that is NaN or infinite, or None."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return None
    for start, block in enumerate(tensor.detach().reshape(-1).split(_BLOCK)):
        # A NaN or inf makes the sum NaN or inf, and a sum is ten times as fast as isfinite. If only the sum
        # overflows, isfinite decides. Half-precision sums would overflow too often.
        if math.isfinite(float(block.sum(dtype=torch.float32 if block.element_size() < 4 else None))):
            continue
        bad = (~block.isfinite()).nonzero()
        if len(bad):
            row = max(1, tensor[0].numel() if tensor.dim() else 1)
            return (start * _BLOCK + int(bad[0])) // row, float(block[int(bad[0])])
    return None
