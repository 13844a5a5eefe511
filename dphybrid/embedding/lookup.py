"""From ids to rows and back: each touched row once, gradients of repeated ids summed into one row each.

Letters: N ids of a lookup (any shape, flattened), U unique ids among them, B bags, D width of a row, V rows of a table.

One stable sort gives everything: the unique ids and, for the way back, the occurrences of each unique id side by side. Both ways are
then bag lookups, for which torch has its fastest CPU kernel: gathering rows is a lookup of bags of one id, summing gradients a lookup in
the gradients themselves. 53,248 Zipf ids, rows of 16 floats, one thread: gathering 0.15 ms against 1.0 of `index_select`, summing 0.2
against 0.8 of `index_add_`; half of that gain needs 32-bit indices, which are used wherever they can count far enough.
The order of additions is the order of the ids, whatever the number of threads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

try:
    import numpy as np
except ModuleNotFoundError:  # torch does without it, so this does, too
    np = None  # type: ignore[assignment]

_INT32_END = 2**31 - 1

_FEW = 8192
"""Below this number of rows numpy copies them in half the time: what counts there is the cost of the call."""

_RADIX_FROM = 32768
"""From this number of values on torch sorts integers by radix on x86; fewer ones are sorted by radix in numpy, 6,656 in a third of the time."""

_NUMPY_THREADS = 2
"""Up to this number of threads numpy, which uses one, writes rows faster than torch."""


@dataclass(frozen=True)
class Occurrences:
    """Where each unique id occurs among N ids: unique id u is unique_U[u] (sorted, int64), at order_N[starts_U[u] : starts_U[u + 1]]."""

    unique_U: Tensor
    order_N: Tensor
    starts_U: Tensor

    def inverse_N(self) -> Tensor:
        """Return the place of each id in unique_U."""
        lengths_U = torch.diff(self.starts_U, append=self.starts_U.new_tensor([len(self.order_N)]))
        places_N = torch.repeat_interleave(torch.arange(len(self.unique_U), dtype=self.order_N.dtype), lengths_U)
        return torch.empty_like(self.order_N).scatter_(0, self.order_N.long(), places_N)


def sort_ids(ids_N: Tensor) -> Occurrences:
    """Return where each unique id of ids_N (int32 or int64, none negative) occurs."""
    sorted_N, order_N = _stably_sorted(ids_N)
    dtype = torch.int32 if ids_N.numel() < _INT32_END else torch.int64
    if np is None:
        unique_U, lengths_U = torch.unique_consecutive(sorted_N, return_counts=True)
        starts_U = lengths_U.cumsum(0).sub_(lengths_U)
    else:  # the same in less than half the time
        values_N = sorted_N.numpy()
        is_start_N = np.ones(len(values_N), bool)
        np.not_equal(values_N[1:], values_N[:-1], out=is_start_N[1:])
        places_U = is_start_N.nonzero()[0]
        unique_U, starts_U = torch.from_numpy(values_N[places_U]), torch.from_numpy(places_U)
    return Occurrences(unique_U.long(), order_N.to(dtype), starts_U.to(dtype))


def _stably_sorted(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    if np is None or ids_N.numel() >= _RADIX_FROM:
        return torch.sort(ids_N, stable=True)
    values_N = ids_N.numpy()
    order_N = values_N.astype(np.uint16).argsort(kind="stable")  # numpy's stable sort of 16 bits is the one by radix
    for bits in range(16, 8 * values_N.itemsize, 16):
        digits_N = (values_N >> bits).astype(np.uint16)
        order_N = order_N[digits_N[order_N].argsort(kind="stable")]
    return torch.from_numpy(values_N[order_N]), torch.from_numpy(order_N)


def short(ids_N: Tensor, num_rows: int) -> Tensor:
    """Return the int64 ids of a table of `num_rows` rows in 32 bits where these are enough: half the bytes to sort and to read."""
    return ids_N.int() if num_rows < _INT32_END else ids_N


def gather_rows(weight_VD: Tensor, ids_N: Tensor) -> Tensor:
    """Return a copy of the rows ids_N (int64, in range): rows_ND."""
    count = ids_N.numel()
    if weight_VD.dtype != torch.float32 or not count:
        return weight_VD.index_select(0, ids_N)
    if np is not None and count < _FEW:
        return torch.from_numpy(weight_VD.numpy().take(ids_N.numpy(), 0, None, "clip"))
    ids_N = short(ids_N, len(weight_VD))
    return _sum_bags(weight_VD, ids_N, _counting(count, ids_N.dtype))


def all_in_range(ids: Tensor, end: int) -> bool:
    """Are all ids (int64, at least one) from 0 to below `end`?"""
    if np is None:
        low, high = torch.aminmax(ids)
        return int(low) >= 0 and int(high) < end
    return int(np.maximum.reduce(ids.numpy().view(np.uint64), axis=None)) < end  # negative ones are the largest then


def write_rows(weight_VD: Tensor, ids_U: Tensor, rows_UD: Tensor) -> None:
    """Write rows_UD to the rows ids_U (int64, unique, in range)."""
    if np is None or torch.get_num_threads() > _NUMPY_THREADS:
        weight_VD.index_copy_(0, ids_U, rows_UD)
        return
    # numpy moves a row as one piece of memory: twice as fast as index_copy_, which moves value by value.
    np.put(_in_one_piece(weight_VD), ids_U.numpy(), _in_one_piece(rows_UD.contiguous()), mode="clip")
    torch.autograd.graph.increment_version(weight_VD)


def _in_one_piece(rows_VD: Tensor) -> "np.ndarray[Any, Any]":
    row_bytes = rows_VD.shape[1] * rows_VD.element_size()
    return rows_VD.view(torch.uint8).numpy().view(f"V{row_bytes}").reshape(-1)


def sum_by_row(grads_ND: Tensor, order_N: Tensor, starts_U: Tensor) -> Tensor:
    """Return grads_UD: the sum of grads_ND over the occurrences of each unique id."""
    if not order_N.numel():
        return grads_ND.new_zeros(0, grads_ND.shape[1])
    return _sum_bags(grads_ND, order_N, starts_U)


def _sum_bags(rows_ND: Tensor, places_M: Tensor, starts_B: Tensor) -> Tensor:
    # What nn.functional.embedding_bag(mode="sum") comes down to, without its checks, which a short step would notice.
    summed_BD: Tensor = torch.embedding_bag(rows_ND, places_M, starts_B)[0]
    return summed_BD


_counted: dict[torch.dtype, Tensor] = {}


def _counting(count: int, dtype: torch.dtype) -> Tensor:
    """Return 0, 1, 2, ... `count - 1` of a type, from one that is kept."""
    kept = _counted.get(dtype)
    if kept is None or kept.numel() < count:
        kept = _counted[dtype] = torch.arange(2 * count, dtype=dtype)
    return kept[:count]


def leaf_rows(num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return a leaf (num_rows, dim) that collects a gradient and takes no memory itself."""
    return torch.empty(1, dtype=dtype).expand(num_rows, dim).requires_grad_()


class RowSums:
    """Gradients of one lookup's ids, to be summed by unique id: all at once, or those of some unique ids just before they are used.

    Summing just before the update keeps the sums in a core's cache, which saves about a tenth of a step on the CPU.
    """

    def __init__(self, where: Occurrences) -> None:
        self.where = where
        self._grads_ND: list[tuple[Tensor, int]] = []

    def add(self, grads_ND: Tensor) -> None:
        """Note gradients; they are read at the latest by the next update and must stay as they are until then."""
        self._grads_ND.append((grads_ND, grads_ND._version))

    def __bool__(self) -> bool:
        return bool(self._grads_ND)

    def part(self, start: int, stop: int) -> Tensor:
        """Return the summed gradients of the unique ids from `start` to before `stop`."""
        starts_U, order_N = self.where.starts_U, self.where.order_N
        if stop - start < starts_U.numel():
            ends = [int(starts_U[place]) if place < starts_U.numel() else order_N.numel() for place in (start, stop)]
            starts_U, order_N = starts_U[start:stop] - ends[0], order_N[ends[0] : ends[1]]
        sums = []
        for grads_ND, version in self._grads_ND:
            if grads_ND._version != version:
                raise RuntimeError("the gradient of looked-up rows was changed in place between backward() and the update")
            sums.append(sum_by_row(grads_ND, order_N, starts_U))
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


class TableRows(torch.autograd.Function):
    """weight_VD -> rows of ids as (*ids.shape, D); their gradient goes to `sums`. anchor: makes autograd come back here, gets none."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor | None, weight_VD: Tensor, ids: Tensor, sums: RowSums) -> Tensor:
        ctx.sums = sums
        rows_ND = gather_rows(weight_VD, ids.reshape(-1)).view(*ids.shape, weight_VD.shape[1])
        return rows_ND.float() if rows_ND.dtype == torch.bfloat16 else rows_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[None, ...]:
        ctx.sums.add(grads.contiguous().view(-1, grads.shape[-1]))
        return None, None, None, None


class TableBags(torch.autograd.Function):
    """(weight_VD, weights_N) -> pooled_BD: the weighted sum of the rows of each bag. offsets_B: where each bag starts among the ids."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf_UD: Tensor | None,
        weights_N: Tensor | None,
        weight_VD: Tensor,
        ids_N: Tensor,
        offsets_B: Tensor,
        where: Occurrences,
    ) -> Tensor:
        rows_ND = None
        if weight_VD.dtype == torch.bfloat16:
            rows_ND = gather_rows(weight_VD, ids_N).float()
            pooled_BD = F.embedding_bag(torch.arange(ids_N.numel()), rows_ND, offsets_B, mode="sum", per_sample_weights=weights_N)
        else:
            pooled_BD = F.embedding_bag(ids_N, weight_VD, offsets_B.to(ids_N.dtype), mode="sum", per_sample_weights=weights_N)
        if ctx.needs_input_grad[1] and rows_ND is None:
            rows_ND = gather_rows(weight_VD, ids_N)
        lengths_B = torch.diff(offsets_B, append=offsets_B.new_tensor([ids_N.numel()]))
        bags_N = torch.repeat_interleave(torch.arange(len(offsets_B), dtype=where.order_N.dtype), lengths_B)
        ctx.where = where
        ctx.save_for_backward(rows_ND, weights_N, bags_N)
        return pooled_BD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_BD: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weights_N, bags_N = ctx.saved_tensors
        where, grads_BD = ctx.where, grads_BD.contiguous()
        grads_UD = grads_N = None
        if ctx.needs_input_grad[0]:
            grads_UD = grads_BD.new_zeros(0, grads_BD.shape[1])
            if where.order_N.numel():
                weights = None if weights_N is None else weights_N.index_select(0, where.order_N)
                sources_N = bags_N.index_select(0, where.order_N)
                grads_UD = F.embedding_bag(sources_N, grads_BD, where.starts_U, mode="sum", per_sample_weights=weights)
        if ctx.needs_input_grad[1]:
            grads_N = (rows_ND * grads_BD.index_select(0, bags_N)).sum(1)
        return grads_UD, grads_N, None, None, None, None
