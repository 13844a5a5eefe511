"""Inputs that all replicas share and that have a row a sample by chance: class weights as long as the batch,
a (T, T) mask with T samples.

Splitting such a tensor computes something else. It is looked for once, before the first split that it is in:
a throwaway copy of the module computes two samples, in evaluation mode. Where that fails and works with the
tensor unsplit, or where the first sample's output depends on the tensor's second row, the tensor belongs to
all samples.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dphybrid.parallel.nests import named_inputs, tensors_of
from dphybrid.parallel.probing import computed, first_rows
from dphybrid.parallel.record import Record
from dphybrid.util.errors import UserError

Arguments = tuple[tuple[object, ...], dict[str, object]]


def refuse_shared_inputs(
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    dim: int,
    home: torch.device,
    record: Record,
) -> None:
    """Raise UserError that names an input which all samples share and which would be split. Asked once for
    inputs of the same names."""
    tensors = {
        id(t): (path, t)  # one given twice stays one
        for name, value in named_inputs(args, kwargs).items()
        for path, t in tensors_of(value, name)
        if t.dim()
    }
    found = list(tensors.values())
    paths = tuple(path for path, _ in found)
    if len(found) < 2 or paths in record.asked:
        return
    record.asked.add(paths)
    expected = _first_output(module, (args, kwargs), dim, home, {})
    for path, tensor in found[1:]:  # the first one is the batch itself
        if not (tensor.is_floating_point() or tensor.dtype == torch.bool) or tensor.is_sparse:
            continue
        other = _other_second_row(tensor, dim) if expected else tensor.detach().to(home, copy=True)
        changed = _first_output(module, (args, kwargs), dim, home, {id(tensor): other})
        if changed and (not expected or not _equal(expected, changed)):
            raise UserError(
                f"{path}: size {tuple(tensor.shape)} has as many rows as there are samples by chance: "
                "outputs depend on more than the sample's own row; wrap what all replicas share in "
                "Whole(...), or name it in whole=[...]"
            )


def note_shares(
    error: Exception, args: tuple[object, ...], kwargs: dict[str, object], sizes: Sequence[int], dim: int
) -> None:
    """Add to an error of a replica what it was given, and what may be meant instead."""
    given = [
        f"{path} {tuple(t.shape)}"
        for name, value in named_inputs(args, kwargs).items()
        for path, t in tensors_of(value, name)
    ]
    error.add_note(
        f"DataParallel split {', '.join(given)} on dim {dim} into shares of {sizes} rows. "
        "If the module works without a split: one sample alone needs a batch dim (x.unsqueeze(0)), and what "
        "all samples share, such as a mask or class weights, is given as Whole(...) or named in whole=[...]"
    )


def _first_output(
    module: nn.Module, inputs: Arguments, dim: int, home: torch.device, instead: dict[int, Tensor]
) -> list[Tensor]:
    """Return the first of two samples' part of each output; nothing where the module fails."""
    try:
        output = computed(module, first_rows(inputs, 2, dim, home, instead), home, training=False)
    except Exception:  # noqa: BLE001 # whatever it is, the module cannot be asked
        return []
    tensors = [t for _, t in tensors_of(output) if -t.dim() <= dim < t.dim() and t.layout is torch.strided]
    return [t.narrow(dim, 0, t.shape[dim] // 2) for t in tensors if t.shape[dim] % 2 == 0]


def _other_second_row(tensor: Tensor, dim: int) -> Tensor:
    changed = tensor.detach().narrow(dim, 0, 2).clone()
    row = changed.select(dim, 1)
    row.copy_(~row if row.dtype == torch.bool else row + 1)
    return changed


def _equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)
        for a, b in zip(one, two, strict=True)
        if not a.is_complex()
    )
