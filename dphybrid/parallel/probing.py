"""Is it chance that an output, or an input, has as many rows as there are samples? Asked once, at the first
forward that leaves it open.

Outputs. Shares of two sizes settle it: what then has its rows in step with the samples has the batch there.
Where all shares are alike, an RNN's state (layers, B, H) of as many layers, a transposed or stacked result, a
parameter or a constant may look like rows by chance. So a throwaway copy of the module computes one sample
more, once: the cost of one replica's forward without gradients; of three where an output has several rows a
sample.

Inputs, such as class weights as long as the batch, or a (T, T) mask with T samples: splitting one that all
replicas share computes something else. The throwaway copy computes two samples, in evaluation mode. Where
that fails and works with the tensor unsplit, or where the first sample's output depends on the tensor's
second row, the tensor belongs to all samples.
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
"""An input, and what all replicas get in its place, unsplit."""


class Trial:
    """Calls a throwaway copy of a module on the first samples of a batch; nothing else is left of the call.

    given: (args, kwargs) of the whole batch. home: where it computes. sizes: of the batch's shares.
    """

    def __init__(
        self, module: nn.Module, given: Any, dim: int, home: torch.device, sizes: Sequence[int]
    ) -> None:
        self.module, self.given, self.dim, self.home, self.sizes = module, given, dim, home, sizes

    @torch.no_grad()
    def __call__(self, rows: int, *, training: bool = True, swap: _Swap = None) -> object:
        """Return what the module makes of so many samples. training: as the module is, else in evaluation
        mode."""
        given = joined(self.given, self.home, self.dim)
        given = map_leaves(lambda v: Whole(swap[1]) if swap and v is swap[0] else v, given)
        ((args, kwargs),) = split(given, [self.home], [rows], self.dim)
        # a module that prints its shares, as the tutorials' do, would print one that no batch has
        silent = redirect_stdout(io.StringIO())
        with own_random_state(self.home), as_replica(0, len(self.sizes)), silent:
            copy = throwaway(self.module, self.home)
            return (copy if training else copy.eval())(*args, **kwargs)


@torch.no_grad()
def refuse_chance_rows(trial: Trial, output: object, leaves: list[Leaf]) -> None:
    """Raise UserError where an output has its rows by chance.

    output: of the first replica. leaves: what was joined of it.
    """
    share = trial.sizes[0]
    if share != trial.sizes[-1] and all(leaf.rows == 1 for leaf in leaves):
        return  # two sizes have settled it
    try:
        # one sample more than a share: what has its rows by chance keeps its size, and cannot be joined
        more = trial(share + 1)
    except Exception as error:  # noqa: BLE001 # a module may refuse any other size, and is right so far
        warnings.warn(
            f"DataParallel: outputs have {share} rows for shares of {share} samples, and it could not be "
            f"seen whether by chance: with {share + 1} samples the module raised {type(error).__name__}: "
            f"{error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    Join(trial.home, trial.dim, [share, share + 1])([output, more], "output")
    if several := [leaf.path for leaf in leaves if leaf.rows > 1]:
        _refuse_sample_minor(trial, several, share)


def _refuse_sample_minor(trial: Trial, paths: list[str], share: int) -> None:
    """Raise UserError for an output with several rows a sample that are not side by side, as those of
    torch.cat([x, -x]): sizes do not tell, but with one sample more its first rows are others."""
    try:
        one, two = (dict(tensors_of(trial(rows, training=False))) for rows in (share, share + 1))
    except Exception:  # noqa: BLE001 # not made to be evaluated
        return
    for path in paths:
        if path in one and path in two:
            a, b = one[path].movedim(trial.dim, 0), two[path].movedim(trial.dim, 0)
            outer = b.unflatten(0, (-1, share + 1))[:, :share].flatten(0, 1)
            if not _equal([a], [b[: len(a)]]) and _equal([a], [outer]):
                raise UserError(
                    f"{path}: its rows go through all samples once and then again; the shares' rows would be "
                    "mixed: return all rows of a sample one behind the other (repeat_interleave instead of "
                    "repeat, a stack on dim 1), or each part as an output of its own"
                )


@contextmanager
def own_random_state(*homes: torch.device) -> Iterator[None]:
    """What the block draws is as if it had not been drawn: torch's generators, Python's, and numpy's where it
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
    """Raise UserError that names an input which all samples share and which would be split."""
    # one given twice stays one; rows in parts are of samples by construction
    found = list({id(t): (path, t) for path, t in input_tensors(*trial.given) if t.dim()}.values())
    if len(found) < 2:
        return
    expected = _first_output(trial)
    for path, tensor in found[1:]:  # the first one is the batch itself
        if not (tensor.is_floating_point() or tensor.dtype == torch.bool) or tensor.is_sparse:
            continue
        # two samples, the second with another row; else the tensor as it is, unsplit
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
    """Add to an error of a replica what it was given, and what may be meant instead."""
    given = [f"{path} {tuple(t.shape)}" for path, t in input_tensors(*trial.given)]
    error.add_note(
        f"DataParallel split {', '.join(given) or 'rows'} on dim {trial.dim} into shares of {trial.sizes} "
        "rows. If the module works without a split: one sample alone needs a batch dim (x.unsqueeze(0)), and "
        "what all samples share, such as a mask or class weights, is given as Whole(...) or named in "
        "whole=[...]"
    )


def _first_output(trial: Trial, swap: _Swap = None) -> list[Tensor]:
    """Return the first of two samples' part of each output; nothing where the module fails."""
    dim = trial.dim
    try:
        output = trial(2, training=False, swap=swap)
    except Exception:  # noqa: BLE001 # whatever it is, the module cannot be asked
        return []
    tensors = [t for _, t in tensors_of(output) if -t.dim() <= dim < t.dim() and t.layout is torch.strided]
    return [t.narrow(dim, 0, t.shape[dim] // 2) for t in tensors if t.shape[dim] % 2 == 0]


def _equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)
        for a, b in zip(one, two, strict=True)
        if not a.is_complex()
    )
