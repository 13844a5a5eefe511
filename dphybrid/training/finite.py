"""Checks that loss, gradients and weights are finite, so that NaN or inf never reach the weights or a
checkpoint."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.embedding import find_tables
from dphybrid.training.checkpoint import how_to_continue
from dphybrid.util.errors import UserError

Rows = tuple[str, Tensor, Tensor | None]
"""(name, rows, row numbers) of a tensor. Row numbers None: the tensor holds all rows."""

_BLOCK = 2**18  # entries checked at once: bounds the memory of the masks
_NAMED = 3  # bad entries that a message names for each stage


def gradient_sum(parameters: Iterable[Tensor]) -> float:
    """Return the sum of all gradients. If it is finite, so is each gradient; the sum of finite gradients may
    still overflow."""
    grads = [p.grad for p in parameters if p.grad is not None]
    sums: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        # If only the sum overflows, `not_finite` checks each gradient, finds nothing, and the step is taken.
        sums.setdefault(values.device, []).append(values.sum().double())
    # One float() for each device: each makes the host wait for that device.
    return sum(float(torch.stack(parts).sum()) for parts in sums.values())


def not_finite(model: nn.Module, batch: Mapping[str, Tensor], loss: Tensor, clipped: bool) -> str:
    """Return what is NaN or infinite after the backward of a step, by stage, or "" when everything is finite.

    clipped: whether gradients were scaled by their norm, which may be infinite although each one is finite.
    """
    found: list[str] = []

    def look(stage: str, tensors: Iterable[Rows]) -> None:
        """Record the first bad entry of each tensor."""
        bad = []
        for name, tensor, ids_U in tensors:
            if (at := first_bad(tensor)) is not None:
                row = at[0] if ids_U is None else int(ids_U[at[0]])
                # Not str.format: names of parameters and columns may contain braces of their own.
                bad.append(f"{name.replace('{row}', str(row))} is {at[1]}")
        if bad:
            more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            found.append(f"{stage}: {', '.join(bad[:_NAMED])}{more}")

    tables = find_tables(model)
    rows = {name: got for name, table in tables.items() if (got := table.row_gradients()) is not None}
    touched: list[Rows] = []
    gradients: list[Rows] = []
    for name, (ids_U, grads_UD) in rows.items():
        touched.append((f"table {name} row {{row}}", tables[name].settled()[ids_U], ids_U))
        gradients.append((f"the gradient of table {name} row {{row}}", grads_UD, ids_U))
    blocks: list[Rows] = [(f"parameter {name}", value, None) for name, value in _blocks(model)]
    gradients += [(f"the gradient of {what}", p.grad, None) for what, p, _ in blocks if p.grad is not None]
    # In the order of computation: the first stage named is usually the cause, the later ones follow from it.
    look("data", [(f"{name} of the batch's sample {{row}}", value, None) for name, value in batch.items()])
    look("lookup", touched)
    look("forward", blocks)
    look("loss", [("the loss", loss, None)])
    look("backward", gradients)
    if not found and clipped:
        found.append("clip: the gradients' norm is infinite, although each of them is finite")
    return "; ".join(found)


def check_finite(
    model: nn.Module, dense: torch.optim.Optimizer | None, rows: Iterable[Rows], step: int, checkpoints: Path
) -> None:
    """Raise UserError when a weight or an optimizer state is NaN or infinite. It names the step and the
    parameter or table row. Costs one pass over the tensors.

    rows: the rows of tables and of their states that may have changed. checkpoints: folder of the earlier
    checkpoints; the message names the last one. Buffers of blocks may be infinite (masks are) but not NaN.
    """
    for what, tensor, ids_U, infinite_too in _tensors(model, dense, rows):
        # A table spread over several processes is no Tensor: each process checks its own rows.
        bad = first_bad(tensor, infinite_too) if isinstance(tensor, Tensor) else tensor.first_bad()
        if bad is not None:
            row = bad[0] if ids_U is None else int(ids_U[bad[0]])
            raise UserError(
                f"{what}{f' row {row}' if tensor.dim() else ''} is not a finite number at step {step}, so no "
                "checkpoint was written; lower train.lr or table.lr, or set train.clip_norm, and "
                f"{how_to_continue(checkpoints)}"
            )


def bad_weight(model: nn.Module) -> str | None:
    """Return which of a model's weights and buffers is NaN or infinite, such as "parameter net.weight", or
    None."""
    tables: list[Rows] = [
        (f"table {name}", table.settled(), None) for name, table in find_tables(model).items()
    ]
    for what, tensor, _, infinite_too in _tensors(model, None, tables):
        bad = first_bad(tensor, infinite_too) if isinstance(tensor, Tensor) else tensor.first_bad()
        if bad is not None:
            return f"{what}{f' row {bad[0]}' if tensor.dim() else ''}"
    return None


def _tensors(
    model: nn.Module, dense: torch.optim.Optimizer | None, rows: Iterable[Rows]
) -> Iterator[tuple[str, Any, Tensor | None, bool]]:
    for what, tensor, ids_U in rows:
        yield what, tensor, ids_U, True
    names: dict[Tensor, str] = {}
    for name, parameter in _blocks(model):
        names[parameter] = name
        yield f"parameter {name}", parameter, None, True
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer, None, False
    for weight, states in (dense.state if dense is not None else {}).items():
        for key, state in states.items():
            if isinstance(state, Tensor):
                yield f"optimizer's {key} of {names.get(weight, 'a parameter')}", state, None, True


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the dense parameters by name: all except the tables' weights."""
    weights = {id(table.weight) for table in find_tables(model).values()}
    return ((name, value) for name, value in model.named_parameters() if id(value) not in weights)


def first_bad(tensor: Tensor, infinite_too: bool = True) -> tuple[int, float] | None:
    """Return row and value of the first entry that is NaN or infinite, or None. infinite_too: False accepts
    infinite entries."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return None
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        # A NaN or inf makes the sum NaN or inf, and a sum is ten times as fast as isfinite. If only the sum
        # overflows, isfinite decides. Half-precision sums would overflow too often.
        if math.isfinite(float(block.sum(dtype=torch.float32 if block.element_size() < 4 else None))):
            continue
        bad = ~torch.isfinite(block) if infinite_too else torch.isnan(block)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            return (start + first) // max(1, tensor[0].numel() if tensor.dim() else 1), float(block[first])
    return None
