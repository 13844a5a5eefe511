"""Checks whether an output, or an input, has as many rows as there are samples only by chance. Runs once, at
the first forward for which sizes leave it open.

Outputs: if shares have two sizes and an output's rows follow them, its rows are the samples. If all shares
are equal, another tensor may look like rows by chance: an RNN's state (layers, B, H) with B layers, a
transposed or stacked result, a parameter, a constant. So a throwaway copy of the module computes a share with
one more sample, once. That costs one replica's forward without gradients, or three if an output has several
rows per sample.

Inputs: a tensor that all samples share, such as class weights as long as the batch or a (T, T) mask with T
samples, must not be split. So the throwaway copy computes two samples in eval mode. The tensor is shared if
that fails but works with the tensor unsplit, or if the first sample's output depends on the tensor's second
row.
"""

import io
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.parallel.applying import as_replica
from dphybrid.parallel.gathering import Join, Leaf
from dphybrid.parallel.nests import Whole, input_tensors, joined, map_leaves, tensors_of
from dphybrid.parallel.replication import throwaway
from dphybrid.parallel.scattering import split
from dphybrid.util.errors import UserError

_Swap = tuple[Tensor, Tensor] | None
"""(an input tensor, the tensor that the module gets unsplit in its place)."""


class Trial:
    """Calls a throwaway copy of a module on the first samples of a batch, without any side effect.

    given: (args, kwargs) of the whole batch. home: device to compute on. sizes: of the batch's shares.
    """

    def __init__(
        self, module: nn.Module, given: Any, dim: int, home: torch.device, sizes: Sequence[int]
    ) -> None:
        self.module, self.given, self.dim, self.home, self.sizes = module, given, dim, home, sizes

    @torch.no_grad()
    def __call__(self, rows: int, *, training: bool = True, swap: _Swap = None) -> object:
        """Return the module's output for the first `rows` samples. training: in the module's present mode;
        False: in eval mode."""
        given = joined(self.given, self.home, self.dim)
        given = map_leaves(lambda v: Whole(swap[1]) if swap and v is swap[0] else v, given)
        ((args, kwargs),) = split(given, [self.home], [rows], self.dim)
        # Modules that print their shares, as in the tutorials, would print one that no batch has.
        silent = redirect_stdout(io.StringIO())
        with own_random_state(self.home), as_replica(0, len(self.sizes)), silent:
            copy = throwaway(self.module, self.home)
            return (copy if training else copy.eval())(*args, **kwargs)


@torch.no_grad()
def refuse_chance_rows(trial: Trial, output: object, leaves: list[Leaf]) -> None:
    """Raise UserError if an output's number of rows matches the samples only by chance.

    output: of the first replica. leaves: the tensors in it that were joined.
    """
    share = trial.sizes[0]
    if share != trial.sizes[-1] and all(leaf.rows == 1 for leaf in leaves):
        return  # shares of two sizes: `Join` has checked that rows follow them
    try:
        # One more sample than a share. A tensor with its rows by chance keeps its size, and `Join` refuses
        # it.
        more = trial(share + 1)
    except Exception as error:  # noqa: BLE001 # a module may accept only one size; not an error
        warnings.warn(
            f"DataParallel: outputs have {share} rows for shares of {share} samples; whether by chance could "
            f"not be checked, as the module raised {type(error).__name__} for {share + 1} samples: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    Join(trial.home, trial.dim, [share, share + 1])([output, more], "output")
    if several := [leaf.path for leaf in leaves if leaf.rows > 1]:
        _refuse_sample_minor(trial, several, share)


def _refuse_sample_minor(trial: Trial, paths: list[str], share: int) -> None:
    """Raise UserError for an output with several rows per sample that are not next to each other, as in
    torch.cat([x, -x]). Sizes do not show that; but with one more sample, its first rows are different."""
    try:
        one, two = (dict(tensors_of(trial(rows, training=False))) for rows in (share, share + 1))
    except Exception:  # noqa: BLE001 # a module that cannot run in eval mode is not checked
        return
    for path in paths:
        if path in one and path in two:
            a, b = one[path].movedim(trial.dim, 0), two[path].movedim(trial.dim, 0)
            outer = b.unflatten(0, (-1, share + 1))[:, :share].flatten(0, 1)
            if not _equal([a], [b[: len(a)]]) and _equal([a], [outer]):
                raise UserError(
                    f"{path}: its rows go through all samples once and then again, so joining would mix the "
                    "shares' rows; return all rows of a sample next to each other (repeat_interleave instead "
                    "of repeat, a stack on dim 1), or each part as a separate output"
                )


@contextmanager
def own_random_state(*homes: torch.device) -> Iterator[None]:
    """Return a context that restores the random generators afterwards: torch's, Python's, and numpy's if it
    is loaded."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng([home for home in homes if home.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def refuse_shared_inputs(trial: Trial) -> None:
    """Raise UserError that names an input which would be split although all samples share it."""
    # A tensor that is passed twice counts once. `Parts` are rows of samples by construction.
    found = list({id(t): (path, t) for path, t in input_tensors(*trial.given) if t.dim()}.values())
    if len(found) < 2:
        return
    expected = _first_output(trial)
    for path, tensor in found[1:]:  # the first one is the batch itself
        if not (tensor.is_floating_point() or tensor.dtype == torch.bool) or tensor.is_sparse:
            continue
        # Change the tensor's second row: does the first sample's output change? If two samples did not work
        # at all (`expected` is empty), try the whole tensor unsplit.
        other = tensor
        if expected:
            other = tensor.detach().narrow(trial.dim, 0, 2).clone()
            row = other.select(trial.dim, 1)
            row.copy_(~row if row.dtype == torch.bool else row + 1)
        changed = _first_output(trial, (tensor, other))
        if changed and (not expected or not _equal(expected, changed)):
            raise UserError(
                f"{path}: size {tuple(tensor.shape)} has as many rows as there are samples by chance: "
                "outputs depend on more than the sample's own row; wrap what all replicas share in "
                "Whole(...), or name it in whole=[...]"
            )


def note_shares(error: Exception, trial: Trial) -> None:
    """Add a note to a replica's error: how the inputs were split, and which mistakes may be the cause."""
    given = [f"{path} {tuple(t.shape)}" for path, t in input_tensors(*trial.given)]
    error.add_note(
        f"DataParallel split {', '.join(given) or 'rows'} on dim {trial.dim} into shares of {trial.sizes} "
        "rows. If the module works without a split: give a single sample a batch dim (x.unsqueeze(0)), and "
        "wrap what all samples share, such as a mask or class weights, in Whole(...) or name it in "
        "whole=[...]"
    )


def _first_output(trial: Trial, swap: _Swap = None) -> list[Tensor]:
    """Compute two samples; return the first sample's part of each output, or nothing if the module fails."""
    dim = trial.dim
    try:
        output = trial(2, training=False, swap=swap)
    except Exception:  # noqa: BLE001 # a module that fails here is not checked
        return []
    tensors = [t for _, t in tensors_of(output) if -t.dim() <= dim < t.dim() and t.layout is torch.strided]
    return [t.narrow(dim, 0, t.shape[dim] // 2) for t in tensors if t.shape[dim] % 2 == 0]


def _equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)
        for a, b in zip(one, two, strict=True)
        if not a.is_complex()
    )
