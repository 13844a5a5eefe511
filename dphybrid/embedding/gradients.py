"""From lookups to one sparse gradient of the table's weight.

Autograd adds sparse gradients row by row, which takes longer than all else of a step. So the later lookups of
a forward depend on the first one, by a tensor without elements, and not on the weight: their backward notes
their gradients, and that of the first, which autograd calls last, makes one sparse gradient of all of them.

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
    # Said explicitly: torch 2.11 warns about each process that makes a sparse tensor and has not said it.
    torch.sparse.check_sparse_tensor_invariants.disable()


@dataclass
class RowsInfo:
    """What optimizers and gradients need to know of the table that a weight belongs to.

    frozen: rows, ascending, that row optimizers leave as they are. synchronized: see
    `HostEmbedding.synchronized`. make_states: makes an optimizer's states where the rows are (in files, say).
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

    def __reduce__(self) -> Any:
        return RowsInfo, (self.name, self.num_rows, self.frozen)


def info_of(weight: Tensor) -> RowsInfo | None:
    """Return what a weight's table said of itself, None for the weight of another module."""
    return getattr(weight, "rows_info", None)


@dataclass
class _Piece:
    """Gradients of one lookup: those of `ids_N` are grads_ND. done: on a GPU, the end of their copy to the
    host."""

    number: int
    ids_N: Tensor
    grads_ND: Tensor
    done: "torch.cuda.Event | None"


class _Pieces:
    """The gradients of lookups that share a link, as backward passes bring them, perhaps side by side."""

    def __init__(self, weight: Tensor) -> None:
        # weak: the graph of a forward would else keep a whole table alive after its model is gone
        self.weight, self.is_leaf, self.shape = weakref.ref(weight), weight.is_leaf, weight.shape
        self.lookups, self.used = 0, False
        self._came: list[_Piece] = []
        self._lock = threading.Lock()

    def note(self, grads: Tensor, number: int, ids_N: Tensor, via: Channel | None) -> None:
        """Keep the gradients of lookup `number`, on their way to the host where they are not there."""
        grads_ND, done = grads.reshape(-1, grads.shape[-1]), None
        if via is not None:
            grads_ND, done = via.start_receiving(grads_ND)
        if grads_ND.shape[-1] > 1 and grads_ND.stride(-1) != 1:
            grads_ND = grads_ND.contiguous()
        with self._lock:
            self._came.append(_Piece(number, ids_N, grads_ND, done))

    def gradient(self) -> Tensor | None:
        """Return the weight's gradient: of all that came since the last call, in the order of the lookups."""
        with self._lock:
            came, self._came, self.used = self._came, [], True
        # several devices' backward threads bring them in any order; sums need one order for the same bits
        came.sort(key=lambda piece: piece.number)
        weight = self.weight()
        info = None if weight is None else info_of(weight)
        _wait(came, info)
        if not came:
            return None
        accumulates = self.is_leaf and weight is not None and weight.grad is not None
        if len(came) == 1 and not accumulates:
            # repeated ids are summed in the optimizer's kernel, in the one pass that it makes anyway
            found = sparse(came[0].ids_N, came[0].grads_ND, self.shape)
        else:
            segments = [native.Segment(each.ids_N, each.grads_ND, self.shape[0]) for each in came]
            frozen = info.frozen if self.is_leaf and info is not None else []
            # torch concatenates values with gaps between rows, and adds others row by row
            ids_U, grads_UD, _ = native.sum_rows(segments, frozen, gap=int(accumulates))
            found = sparse(ids_U, grads_UD, self.shape)
        # what computes a weight (weight_norm, ...) takes no sparse gradient
        return found if self.is_leaf else found.to_dense()


class _Rows(torch.autograd.Function):
    """The weight, or a link, and (looked-up rows, pieces, what `_Pieces.note` wants) as no input -> the rows,
    and a link: a tensor without elements, on the host as its gradients are."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        rows, ctx.pieces, *ctx.noted = given
        # None for rows that the loss does not use: zeros would count as a gradient of theirs
        ctx.set_materialize_grads(False)
        return rows, torch.empty(0, dtype=rows.dtype, device=native.CPU)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None]:
        if grads is not None:
            ctx.pieces.note(grads, *ctx.noted)
        if ctx.noted[0]:  # a later lookup, whose gradient is that of the link
            return None if grads is None else torch.empty(0, dtype=grads.dtype, device=native.CPU), None
        return ctx.pieces.gradient(), None


def _wait(came: Sequence[_Piece], info: RowsInfo | None) -> None:
    start, events = time.perf_counter(), [each.done for each in came if each.done is not None]
    for event in events:
        event.synchronize()
    if events and info is not None:
        info.counters.d2h_ms += 1e3 * (time.perf_counter() - start)


class Links:
    """The link of a table's lookups in the present forward."""

    def __init__(self) -> None:
        # not in `_Pieces`, which the link's own graph holds: such a circle is never freed
        self._link: tuple[Tensor, _Pieces] | None = None

    def rows(self, weight: Tensor, rows: Tensor, ids_N: Tensor, via: Channel | None = None) -> Tensor:
        """Return looked-up rows whose gradients reach the weight. via: the way back from their device."""
        # a link belongs to one forward: after its backward, or with another weight, a new one begins
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
    """Return the sparse gradient (V, D) of a weight without a copy; ids may repeat."""
    return torch.sparse_coo_tensor(ids_N.view(1, -1), grads_ND, shape, check_invariants=False)


def segment_of(grad: Tensor, weight: Tensor, first_key: int = 0) -> native.Segment:
    """Return a weight's gradient as the kernels read it; a dense one, of a weight used as a whole, has all
    rows."""
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
    """Return (ids_U sorted and unique, grads_UD, squares_U of their norms) of a weight's gradient, without
    frozen rows; None without a gradient."""
    if weight.grad is None:
        return None
    info = info_of(weight)
    frozen = [] if info is None else info.frozen
    return native.sum_rows([segment_of(weight.grad, weight)], frozen, squares=True)


@torch.library.custom_op("dphybrid::rows", mutates_args=())
def rows_op(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of `ids`, for graphs that torch captures: they cannot hold a Python function."""
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
    """Is a graph being made, or are these not tensors with values in host memory?"""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or not (native.is_plain(weight) and native.is_plain(ids))
    )


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Tensor:
    """Scale the gradients of parameters, tables' weights among them, so that their common 2-norm is at most
    `max_norm`; return the norm before.

    torch's function of the same name refuses sparse gradients. A weight's gradient is summed by row; frozen
    rows do not count.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    found = [parameter for parameter in given if parameter.grad is not None]
    sparse_ones = [weight for weight in found if weight.grad is not None and weight.grad.is_sparse]
    dense = [p.grad for p in found if p.grad is not None and not p.grad.is_sparse]
    for weight in found:
        info = info_of(weight)
        if info is not None and info.frozen and weight.grad is not None and not weight.grad.is_sparse:
            weight.grad[info.frozen] = 0.0
    # begun before the rows are summed, so that a GPU computes meanwhile; read after, with one wait
    norms = [norm.to(dense[0].device) for norm in torch._foreach_norm(dense)] if dense else []
    squares = []
    for weight in sparse_ones:
        rows = merged(weight)
        assert rows is not None
        # new memory: the values may be the incoming gradient itself, which a hook or a later backward holds
        weight.grad = sparse(rows[0], rows[1], weight.shape)
        squares.append(rows[2].sum())
    if norms:
        squares = [*torch.stack(norms).double().cpu().square(), *squares]
    # not torch's root, which is not always the nearest number and depends on the processor
    total = math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
    factor = min(1.0, max_norm / (total + 1e-6))
    if factor < 1:
        values = dense + [weight.grad._values() for weight in sparse_ones if weight.grad is not None]
        if values:
            torch._foreach_mul_(values, factor)
    return torch.tensor(total, dtype=torch.float64)
