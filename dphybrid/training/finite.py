"""Whether what a checkpoint would hold are numbers: nothing that is none is written over good checkpoints."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dphybrid.embedding import RowOptimizer, find_tables
from dphybrid.util.errors import UserError

_BLOCK = 2**18


def check_finite(
    model: nn.Module, dense: torch.optim.Optimizer | None, rows: RowOptimizer | None, step: int
) -> None:
    """Raise UserError with step, table and row, or parameter, when a weight or an optimizer's state is NaN or
    infinite.

    Buffers of blocks may be infinite (masks are), not NaN. Costs one pass over memory.
    """
    for what, tensor, infinite_too in _tensors(model, dense, rows):
        if (place := _first_bad(tensor, infinite_too)) is not None:
            raise UserError(
                f"{what}{f' row {place}' if tensor.dim() else ''} is no finite number by step {step}, no "
                "checkpoint is made of it; "
                "lower train.lr or table.lr, or set train.clip_norm, and go on from the last checkpoint "
                "with --resume"
            )


def _tensors(
    model: nn.Module, dense: torch.optim.Optimizer | None, rows: RowOptimizer | None
) -> Iterator[tuple[str, Tensor, bool]]:
    for name, table in find_tables(model).items():
        yield f"table {name}", table.weight, True
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        yield f"parameter {name}", parameter, True
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer, False
    for key, state in (rows.state_dict() if rows is not None else {}).items():
        yield f"row optimizer's {key}", state, True
    for weight, states in (dense.state if dense is not None else {}).items():
        for key, state in states.items():
            if isinstance(state, Tensor):
                yield f"optimizer's {key} of {names.get(weight, 'a parameter')}", state, True


def _first_bad(tensor: Tensor, infinite_too: bool) -> int | None:
    if not tensor.is_floating_point():
        return None
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        # A sum over any that is no number is none either. Ten times as fast as isfinite; one that overflows
        # is looked at again.
        if math.isfinite(float(block.sum(dtype=torch.float32 if block.element_size() < 4 else None))):
            continue
        bad = ~torch.isfinite(block) if infinite_too else torch.isnan(block)
        if bool(bad.any()):
            return (start + int(bad.nonzero()[0])) // max(1, tensor[0].numel() if tensor.dim() else 1)
    return None
