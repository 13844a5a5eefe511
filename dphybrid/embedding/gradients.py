"""Turns the gradients of all lookups in a forward into one sparse gradient of the table's weight.

Autograd adds sparse gradients row by row, which takes longer than the rest of a step. So only the first
lookup of a forward is a function of the weight. The later ones depend on the first through a link, a tensor
without elements. Their backward only stores their gradients; the backward of the first lookup, which autograd
therefore calls last, builds one sparse gradient from all of them.

Letters: N ids of a lookup, U unique ids, D width of a row, V rows of the table.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dphybrid.embedding import native
from dphybrid.embedding.ahead import LookupsAhead
from dphybrid.embedding.lookup import Counters
from dphybrid.embedding.replicas import Channel

if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
    # Already off, but torch 2.11 warns in each process that makes a sparse tensor without having set it.
    torch.sparse.check_sparse_tensor_invariants.disable()


@dataclass
class RowsInfo:
    """What optimizers and gradients need to know about the table that owns a weight.

    frozen: ascending rows that row optimizers do not change. synchronized: see `HostEmbedding.synchronized`.
    make_states: allocates an optimizer's states in the same kind of storage as the rows (such as files).
    """

    name: str
    num_rows: int
    frozen: list[int] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    synchronized: bool = False
    make_states: Callable[[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], dict[str, Tensor]] | None = (
        None
    )

    def __post_init__(self) -> None:
        self.ahead = LookupsAhead(self.name, self.counters)

    # A copy gets new counters and no `make_states`, which refers to the original's file.
    def __reduce__(self) -> Any:
        return RowsInfo, (self.name, self.num_rows, self.frozen)


def info_of(weight: Tensor) -> RowsInfo | None:
    """Return the info of the table that owns a weight, or None for the weight of another module."""
    return getattr(weight, "rows_info", None)


@dataclass
class _Piece:
    """Gradients of one lookup: grads_ND of the rows ids_N. number: of the lookup in its forward. done: event
    at the end of the copy from a GPU to the host."""

    number: int
    ids_N: Tensor
    grads_ND: Tensor
    done: "torch.cuda.Event | None"


class _Pieces:
    """Collects the gradients of lookups that share a link. Several devices' backward threads may add to
    it."""

    def __init__(self, weight: Tensor) -> None:
        # Weak: otherwise the graph of a forward would keep the whole table alive after its model is gone.
        self.weight, self.is_leaf, self.shape = weakref.ref(weight), weight.is_leaf, weight.shape
        self.lookups, self.used = 0, False
        self._arrived: list[_Piece] = []
        self._lock = threading.Lock()

    def note(self, grads: Tensor, number: int, ids_N: Tensor, via: Channel | None) -> None:
        """Store the gradients of lookup `number`. If they are on a GPU, start copying them to the host by
        `via`."""
        grads_ND, done = grads.reshape(-1, grads.shape[-1]), None
        if via is not None:
            grads_ND, done = via.start_receiving(grads_ND)
        if grads_ND.shape[-1] > 1 and grads_ND.stride(-1) != 1:
            grads_ND = grads_ND.contiguous()
        with self._lock:
            self._arrived.append(_Piece(number, ids_N, grads_ND, done))

    def gradient(self) -> Tensor | None:
        """Return the weight's gradient from everything stored since the last call, or None."""
        with self._lock:
            pieces, self._arrived, self.used = self._arrived, [], True
        # Backward threads of several devices store in any order; a fixed order gives the same sums each time.
        pieces.sort(key=lambda piece: piece.number)
        weight = self.weight()
        info = None if weight is None else info_of(weight)
        _wait_for(pieces, info)
        if not pieces:
            return None
        accumulates = self.is_leaf and weight is not None and weight.grad is not None
        if len(pieces) == 1 and not accumulates:
            # No sum here: the optimizer's kernel sums repeated ids in the pass that it makes anyway.
            found = sparse(pieces[0].ids_N, pieces[0].grads_ND, self.shape)
        else:
            segments = [native.Segment(piece.ids_N, piece.grads_ND, self.shape[0]) for piece in pieces]
            frozen = info.frozen if self.is_leaf and info is not None else []
            # If there is a gradient already, autograd will add this one to it. torch adds sparse gradients
            # row by row if their values are contiguous, but concatenates them if there are gaps between rows.
            ids_U, grads_UD, _ = native.sum_rows(segments, frozen, gap=int(accumulates))
            found = sparse(ids_U, grads_UD, self.shape)
        # A computed weight (weight_norm, ...) passes its gradient to torch functions that need a dense one.
        return found if self.is_leaf else found.to_dense()


class _Rows(torch.autograd.Function):
    """(weight or link, (looked-up rows, pieces, arguments of `_Pieces.note`)) -> (the rows, a link).

    The rows pass through unchanged and depend on the source, for autograd. The link is a tensor without
    elements, on the host because its gradient is there.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        rows, ctx.pieces, *ctx.noted = given
        # So backward gets None, not zeros, for rows that the loss does not use. Zeros would count as a
        # gradient: the row optimizer would touch these rows.
        ctx.set_materialize_grads(False)
        return rows, torch.empty(0, dtype=rows.dtype, device=native.CPU)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None]:
        if grads is not None:
            ctx.pieces.note(grads, *ctx.noted)
        if ctx.noted[0]:  # not the first lookup: its source is the link, which has no elements
            return None if grads is None else torch.empty(0, dtype=grads.dtype, device=native.CPU), None
        return ctx.pieces.gradient(), None


def _wait_for(pieces: Sequence[_Piece], info: RowsInfo | None) -> None:
    """Wait until all pieces are on the host; count the time."""
    start, events = time.perf_counter(), [piece.done for piece in pieces if piece.done is not None]
    for event in events:
        event.synchronize()
    if events and info is not None:
        info.counters.d2h_ms += 1e3 * (time.perf_counter() - start)


class Links:
    """Holds the link between a table's lookups in the present forward."""

    def __init__(self) -> None:
        # Not in `_Pieces`: the link's graph holds those, and such a cycle through autograd is never freed.
        self._link: tuple[Tensor, _Pieces] | None = None

    def rows(self, weight: Tensor, rows: Tensor, ids_N: Tensor, via: Channel | None = None) -> Tensor:
        """Return looked-up rows as a function of the weight, for autograd. via: the channel that brings
        their gradients back from a device."""
        # A link belongs to one forward: start a new one after its backward, or if the weight was replaced.
        if self._link is None or self._link[1].used or self._link[1].weight() is not weight:
            pieces = _Pieces(weight)
            linked, link = _Rows.apply(weight, (rows, pieces, 0, ids_N, via))
            self._link = link, pieces
        else:
            link, pieces = self._link
            pieces.lookups += 1
            linked, _ = _Rows.apply(link, (rows, pieces, pieces.lookups, ids_N, via))
        return cast(Tensor, linked)


def sparse(ids_N: Tensor, grads_ND: Tensor, shape: torch.Size) -> Tensor:
    """Return a sparse gradient of `shape` (V, D) that shares the memory of ids and gradients; ids may
    repeat."""
    return torch.sparse_coo_tensor(ids_N.view(1, -1), grads_ND, shape, check_invariants=False)


def segment_of(grad: Tensor, weight: Tensor, first_key: int = 0) -> native.Segment:
    """Return a weight's gradient in the form that the kernels read. A dense gradient, of a weight used as a
    whole, has all rows."""
    real = native.real_dtype(weight.dtype)
    num_rows, dim = weight.shape
    if grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
        ids_N, grads_ND = grad._indices().select(0, 0), grad._values()
    else:
        ids_N, grads_ND = torch.arange(num_rows), grad.to_dense()
    if grads_ND.dtype is not real or not grads_ND.is_cpu:
        grads_ND = grads_ND.to("cpu", real)
    if dim > 1 and grads_ND.stride(1) != 1:
        grads_ND = grads_ND.contiguous()
    return native.Segment(ids_N, grads_ND, num_rows, first_key)


def merged(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (ids_U sorted and unique, grads_UD, squared norms squares_U) of a weight's gradient, without
    frozen rows; None if it has no gradient."""
    if weight.grad is None:
        return None
    info = info_of(weight)
    frozen = [] if info is None else info.frozen
    return native.sum_rows([segment_of(weight.grad, weight)], frozen, squares=True)


@torch.library.custom_op("dphybrid::rows", mutates_args=())
def rows_op(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of `ids`, as an operator. Graphs that torch captures cannot hold a Python function such
    as `_Rows`."""
    return native.look_up(weight.detach(), ids.to("cpu", torch.int64))[0]


@rows_op.register_fake
def _fake_rows(weight: Tensor, ids: Tensor) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]), dtype=native.real_dtype(weight.dtype))


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[1])
    ctx.shape = inputs[0].shape


def _rows_backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
    (ids,) = ctx.saved_tensors
    return sparse(ids.reshape(-1).long(), grads.reshape(-1, grads.shape[-1]), ctx.shape), None


rows_op.register_autograd(_rows_backward, setup_context=_keep_for_backward)


def is_captured(weight: Tensor, ids: Tensor) -> bool:
    """Return whether torch is capturing a graph, or a tensor has no values in host memory (fake, meta)."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or not (native.is_plain(weight) and native.is_plain(ids))
    )


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Tensor:
    """Scale the gradients of parameters, including tables' weights, so that their total 2-norm is at most
    `max_norm`; return the norm before scaling.

    torch's function of the same name refuses sparse gradients. Gradients of the same row are summed first;
    frozen rows do not count.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    found = [parameter for parameter in given if parameter.grad is not None]
    sparse_ones = [weight for weight in found if weight.grad is not None and weight.grad.is_sparse]
    dense = [p.grad for p in found if p.grad is not None and not p.grad.is_sparse]
    for weight in found:
        info = info_of(weight)
        if info is not None and info.frozen and weight.grad is not None and not weight.grad.is_sparse:
            weight.grad[info.frozen] = 0.0
    # Started before the rows are summed, so that a GPU computes meanwhile; read below, with one wait for all.
    norms = [norm.to(dense[0].device) for norm in torch._foreach_norm(dense)] if dense else []
    squares = []
    for weight in sparse_ones:
        rows = merged(weight)
        assert rows is not None
        # In new memory, as the values are scaled in place below. The old ones may be the incoming gradient
        # itself, which a hook or a later backward still holds.
        weight.grad = sparse(rows[0], rows[1], weight.shape)
        squares.append(rows[2].sum())
    if norms:
        squares = [*torch.stack(norms).double().cpu().square(), *squares]
    # Not torch.sqrt, which is not always correctly rounded and differs between processors.
    total = math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
    factor = min(1.0, max_norm / (total + 1e-6))
    if factor < 1:
        values = dense + [weight.grad._values() for weight in sparse_ones if weight.grad is not None]
        if values:
            torch._foreach_mul_(values, factor)
    return torch.tensor(total, dtype=torch.float64)
