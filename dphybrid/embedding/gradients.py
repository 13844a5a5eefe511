"""Turns the gradients of lookups into one sparse gradient of the table's weight.

Autograd would add the sparse gradients of several lookups row by row, which takes longer than the rest of a
step. So lookups are functions of a gate, and the gate is a function of the weight. The gate's gradient is a
list of the lookups' gradients, which autograd joins; the gate's backward sums them in one pass.

Letters: N ids of a lookup, U unique ids, D width of a row, V rows of the table.
"""

import itertools
import math
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dphybrid.embedding import native
from dphybrid.embedding.lookup import not_differentiable
from dphybrid.embedding.replicas import Channel
from dphybrid.embedding.weights import RowsInfo, info_of, without_padding
from dphybrid.kernels import is_batched
from dphybrid.util.errors import UserError

if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
    # Already off, but torch 2.11 warns in each process that makes a sparse tensor without having set it.
    torch.sparse.check_sparse_tensor_invariants.disable()


class _LookupGradients(NamedTuple):
    """Gradients of one lookup: grads_ND of the rows ids_N. number: (replica, number of the lookup), so that
    they are summed in the same order whichever replica's thread comes first. done: event at the end of the
    copy from a GPU to the host."""

    number: tuple[int, int]
    ids_N: Tensor
    grads_ND: Tensor
    done: "torch.cuda.Event | None"


class _RowGradients(Tensor):
    """Gradient of a gate: the gradients of one lookup, or of several that autograd has added.

    A tensor class of its own, as autograd adds the gradients of several lookups, and torch's sum of two
    sparse tensors goes row by row. The sum of two of these joins their lists; any other operation sees the
    sparse tensor of all lookups.
    """

    lookups: list[_LookupGradients]

    @staticmethod
    def __new__(cls, lookups: list[_LookupGradients], shape: torch.Size) -> "_RowGradients":
        dtype = lookups[0].grads_ND.dtype
        made: _RowGradients = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=native.CPU)
        made.lookups = lookups
        return made

    def as_sparse(self) -> Tensor:
        """Return one sparse tensor of all lookups, not summed."""
        _wait_for(self.lookups)
        ids_N = torch.cat([lookup.ids_N for lookup in self.lookups])
        return sparse(ids_N, torch.cat([lookup.grads_ND for lookup in self.lookups]), self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it as a static method
        cls, func: Any, _: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and type(args[0]) is type(args[1]) is cls and not kwargs:
            return cls(args[0].lookups + args[1].lookups, args[0].shape)
        return func(*(arg.as_sparse() if type(arg) is cls else arg for arg in args), **(kwargs or {}))


class _Gate(torch.autograd.Function):
    """weight -> the gate through which lookups depend on it: a tensor of the weight's shape without memory.

    It only collects gradients: its own gradient is the sum of the lookups', of which it makes one sparse
    gradient of the weight.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weakref.ref(weight)
        dtype = native.real_dtype(weight.dtype)
        return torch.empty((), dtype=dtype, device=native.CPU).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        weight = ctx.weight()
        is_leaf, info = weight is not None and weight.is_leaf, None if weight is None else info_of(weight)
        if isinstance(grad, _RowGradients):
            grad = _summed(grad, info, is_leaf and weight.grad is not None)
        # A weight that other operations compute passes its gradient on to them, and many need a dense one.
        return grad if grad is None or is_leaf or not grad.is_sparse else grad.to_dense()


def _summed(grad: _RowGradients, info: RowsInfo | None, accumulates: bool) -> Tensor:
    """Return the sparse gradient of all lookups. accumulates: autograd will add it to one that is there."""
    # Backward threads of several devices add in any order; a fixed order gives the same sums each time.
    lookups = sorted(grad.lookups, key=lambda lookup: lookup.number)
    waited_ms = _wait_for(lookups)
    if info is not None:
        info.counters.d2h_ms += waited_ms
    if len(lookups) == 1 and not accumulates:
        # No sum here: the optimizer's kernel sums repeated ids in the pass that it makes anyway.
        return sparse(lookups[0].ids_N, lookups[0].grads_ND, grad.shape)
    segments = [native.Segment(lookup.ids_N, lookup.grads_ND, grad.shape[0]) for lookup in lookups]
    # torch adds sparse gradients row by row if their values are contiguous, but concatenates them if there
    # are gaps between rows.
    ids_U, grads_UD, _ = native.sum_rows(segments, gap=int(accumulates))
    return sparse(ids_U, grads_UD, grad.shape)


class _Rows(torch.autograd.Function):
    """(gate, (looked-up rows, number, ids_N, channel from a device, padding)) -> the rows, which pass through
    unchanged and depend on the gate, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, given: tuple[Tensor, tuple[int, int], Tensor, Channel | None, int | None]
    ) -> Tensor:
        rows, number, ids_N, *noted = given
        ctx.save_for_backward(ids_N)  # freed by the first backward, so that a second one raises
        ctx.shape, ctx.noted = gate.shape, (number, *noted)
        ctx.set_materialize_grads(False)  # as `DeviceRows`
        return rows

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None) -> tuple[Tensor | None, None]:
        if grads is None:
            return None, None
        (ids_N,), (number, via, padding), done = ctx.saved_tensors, ctx.noted, None
        if grads.requires_grad or is_batched(grads):
            raise not_differentiable()
        ids_N, grads_ND = without_padding(ids_N, grads.reshape(-1, grads.shape[-1]), padding)
        if via is not None:
            grads_ND, done = via.start_receiving(grads_ND)
        if grads_ND.shape[-1] > 1 and grads_ND.stride(-1) != 1:
            grads_ND = grads_ND.contiguous()
        return _RowGradients([_LookupGradients(number, ids_N, grads_ND, done)], ctx.shape), None


def _wait_for(lookups: Sequence[_LookupGradients]) -> float:
    """Wait until the gradients of all lookups are on the host; return the milliseconds."""
    start, events = time.perf_counter(), [lookup.done for lookup in lookups if lookup.done is not None]
    for event in events:
        event.synchronize()
    return 1e3 * (time.perf_counter() - start) if events else 0.0


class Gates:
    """Makes looked-up rows functions of a table's weight, for autograd, through a gate that all lookups of
    the weight share."""

    def __init__(self) -> None:
        self._gate: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._numbers = itertools.count()

    def rows(
        self,
        weight: Tensor,
        rows: Tensor,
        ids_N: Tensor,
        padding: int | None,
        via: Channel | None = None,
        replica: int | None = None,
    ) -> Tensor:
        """Return looked-up rows as a function of the weight.

        Args:
            padding: A row that gets no gradient.
            via: The channel that brings the gradients back from a device.
            replica: The replica that looks up, if one does.
        """
        number = -1 if replica is None else replica, next(self._numbers)
        kept = self._gate  # read once: another thread may look up meanwhile
        if kept is None or kept[0]() is not weight or kept[1].shape != weight.shape or not weight.is_leaf:
            # Dropped first: a gate keeps autograd's note of the weight's shape alive.
            kept = self._gate = None
            kept = weakref.ref(weight), cast(Tensor, _Gate.apply(weight))
            if weight.is_leaf:  # else its graph would stay, too
                self._gate = kept
        return cast(Tensor, _Rows.apply(kept[1], (rows, number, ids_N, via, padding)))


def sparse(ids_N: Tensor, grads_ND: Tensor, shape: torch.Size) -> Tensor:
    """Return a sparse gradient of `shape` (V, D) that shares the memory of ids and gradients; ids may
    repeat."""
    return torch.sparse_coo_tensor(
        ids_N.view(1, -1), grads_ND, shape, device=grads_ND.device, check_invariants=False
    )


def segment_of(weight: Tensor) -> native.Segment:
    """Return a weight's gradient in the form that the kernels read. A dense gradient, of a weight used as a
    whole, has all rows but padding."""
    grad, real, (num_rows, dim) = weight.grad, native.real_dtype(weight.dtype), weight.shape
    assert grad is not None
    if grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
        ids_N, grads_ND = grad._indices().select(0, 0), grad._values()
    else:
        ids_N, grads_ND, info = torch.arange(num_rows, device=native.CPU), grad.to_dense(), info_of(weight)
        if info is not None:
            ids_N, grads_ND = without_padding(ids_N, grads_ND, info.padding)
    if grads_ND.dtype is not real or not grads_ND.is_cpu:
        grads_ND = grads_ND.to("cpu", real)
    if dim > 1 and grads_ND.stride(1) != 1:
        grads_ND = grads_ND.contiguous()
    return native.Segment(ids_N, grads_ND, num_rows)


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Tensor:
    """Scale the gradients of parameters, including tables' weights, so that their total 2-norm is at most
    `max_norm`; return the norm before scaling.

    torch's function of the same name refuses sparse gradients. Gradients of the same row are summed first;
    padding does not count. Raises UserError for a `max_norm` below 0 or NaN.
    """
    if not max_norm >= 0:
        raise UserError(f"clip_grad_norm_: max_norm={max_norm}; give a number of at least 0")
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    tables, gradients = list[Tensor](), list[Tensor]()
    for parameter in parameters:
        if (grad := parameter.grad) is not None and grad.is_sparse:
            tables.append(parameter)
        elif grad is not None:
            gradients.append(grad)
            if (info := info_of(parameter)) is not None and info.padding is not None:
                grad[info.padding] = 0.0
    # Started before the rows are summed, so that a GPU computes meanwhile; read below, with one wait for all.
    norms = [norm.to(gradients[0].device) for norm in torch._foreach_norm(gradients)] if gradients else []
    squares = []
    for weight in tables:
        ids_U, grads_UD, squares_U = native.sum_rows([segment_of(weight)], squares=True)
        # In new memory, as the values are scaled in place below. The old ones may be the incoming gradient
        # itself, which a hook or a later backward still holds.
        weight.grad = sparse(ids_U, grads_UD, weight.shape)
        gradients.append(weight.grad._values())
        if (info := info_of(weight)) is not None and info.numbers_of is not None:
            squares_U = squares_U[info.numbers_of(ids_U).argsort()]  # summed in the order of the numbers
        squares.append(squares_U.sum())
    if norms:
        squares = [*torch.stack(norms).double().cpu().square(), *squares]
    # Not torch.sqrt, which is not always correctly rounded and differs between processors.
    total = math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
    factor = max_norm / (total + 1e-6)
    if not factor >= 1 and gradients:  # NaN, too, goes to all gradients, as in torch
        torch._foreach_mul_(gradients, factor)
    return torch.tensor(total, dtype=torch.float64, device=native.CPU)


def clip_rows_too(trainer: Any) -> None:
    """Make a Trainer of transformers clip rows and dense parameters by their common norm, and log it; torch's
    functions refuse sparse gradients."""

    def clip(parameters: Iterable[Tensor], max_norm: float, *_: Any) -> Tensor:
        # The replaced function unscales, too; it has an effect only with float16.
        trainer.accelerator.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm)

    # The Trainer clips by this function of its accelerator.
    trainer.accelerator.clip_grad_norm_ = clip
