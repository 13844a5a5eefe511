"""Whether loss, gradients and weights are finite numbers: an update never puts NaN or inf into weights, nor
written over good checkpoints."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.embedding import find_tables
from dphybrid.training.checkpoint import way_on
from dphybrid.util.errors import UserError

Rows = tuple[str, Tensor, Tensor | None]
"""What it is, its rows, and their numbers; None: all of them."""

_BLOCK = 2**18
_NAMED = 3


@dataclass(frozen=True)
class NotFinite:
    """What of a step is NaN or infinite, by the stage that shows it first. weight: is a weight among it?"""

    text: str
    weight: bool


def gradient_sum(parameters: Iterable[Tensor]) -> float:
    """Return the sum of all gradients: a finite number only if each of them is one, and mostly then."""
    grads = [p.grad for p in parameters if p.grad is not None]
    sums: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        # Where this sum alone overflows, `not_finite` looks at each gradient and finds nothing.
        sums.setdefault(values.device, []).append(values.sum().double())
    return sum(float(torch.stack(parts).sum()) for parts in sums.values())


def kept_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return each buffer that a forward may change (running means, counts) with a copy of it."""
    return [(buffer, buffer.clone()) for buffer in model.buffers()]


def not_finite(
    model: nn.Module, batch: Mapping[str, Tensor], loss: Tensor, clipped: bool
) -> NotFinite | None:
    """Return what of a step is NaN or infinite after its backward, or None when all of it are finite numbers.

    clipped: were the gradients scaled down by their norm, which may be infinite where none of them is?
    """
    found: list[str] = []

    def look(stage: str, tensors: Iterable[Rows]) -> bool:
        """Note the first bad entry of each tensor."""
        bad = []
        for name, tensor, ids_U in tensors:
            if (at := first_bad(tensor)) is not None:
                row = at[0] if ids_U is None else int(ids_U[at[0]])
                bad.append(f"{name.format(row=row)} is {at[1]}")
        if bad:
            more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            found.append(f"{stage}: {', '.join(bad[:_NAMED])}{more}")
        return bool(bad)

    tables = find_tables(model)
    rows = {name: got for name, table in tables.items() if (got := table.row_gradients()) is not None}
    touched: list[Rows] = []
    gradients: list[Rows] = []
    for name, (ids_U, grads_UD) in rows.items():
        touched.append((f"table {name} row {{row}}", tables[name].settled()[ids_U], ids_U))
        gradients.append((f"the gradient of table {name} row {{row}}", grads_UD, ids_U))
    blocks: list[Rows] = [(f"parameter {name}", value, None) for name, value in _blocks(model)]
    gradients += [(f"the gradient of {what}", p.grad, None) for what, p, _ in blocks if p.grad is not None]
    look("data", [(f"{name} of the batch's sample {{row}}", value, None) for name, value in batch.items()])
    weight = look("lookup", touched)
    weight |= look("forward", blocks)
    look("loss", [("the loss", loss, None)])
    look("backward", gradients)
    if not found and clipped:
        found.append("clip: the gradients' norm is infinite, each of them is finite")
    return NotFinite("; ".join(found), weight) if found else None


def check_finite(
    model: nn.Module, dense: torch.optim.Optimizer | None, rows: Iterable[Rows], step: int, checkpoints: Path
) -> None:
    """Raise UserError with step, table and row, or parameter, when a weight or an optimizer's state is NaN or
    infinite.

    rows: of tables and of their states, those that may have changed. checkpoints: the folder of those made
    before, the last of which is named. Buffers of blocks may be infinite (masks are), not NaN. Costs one pass
    over them.
    """
    for what, tensor, ids_U, infinite_too in _tensors(model, dense, rows):
        # Rows that lie with other processes are looked at there.
        bad = first_bad(tensor, infinite_too) if isinstance(tensor, Tensor) else tensor.first_bad()
        if bad is not None:
            row = bad[0] if ids_U is None else int(ids_U[bad[0]])
            raise UserError(
                f"{what}{f' row {row}' if tensor.dim() else ''} is not a finite number by step {step}, no "
                "checkpoint is made of it; lower train.lr or table.lr, or set train.clip_norm, and "
                f"{way_on(checkpoints)}"
            )


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
    """Yield the parameters that are no table's rows, by name."""
    weights = {id(table.weight) for table in find_tables(model).values()}
    return ((name, value) for name, value in model.named_parameters() if id(value) not in weights)


def first_bad(tensor: Tensor, infinite_too: bool = True) -> tuple[int, float] | None:
    """Return the row of the first entry that is not a finite number, and that entry; infinite ones pass where
    `infinite_too` is False."""
    if not tensor.is_floating_point():
        return None
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        # nan and inf carry over into the sum, which is ten times as fast as isfinite; a sum that overflows is
        # looked at again.
        if math.isfinite(float(block.sum(dtype=torch.float32 if block.element_size() < 4 else None))):
            continue
        bad = ~torch.isfinite(block) if infinite_too else torch.isnan(block)
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            return (start + place) // max(1, tensor[0].numel() if tensor.dim() else 1), float(block[place])
    return None
