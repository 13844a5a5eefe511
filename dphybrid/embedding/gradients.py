"""Gradients of a table's lookups since the last update, wherever they are, as gradients of unique rows.

Letters: U unique ids, C some of them, D width of a row.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dphybrid.embedding.counters import Counters
from dphybrid.embedding.lookup import RowSums, leaf_rows, short, sort_ids, sum_by_row
from dphybrid.embedding.replicas import Channel


@dataclass
class _Pending:
    """Where the gradients of one lookup are: in `sums`, or in those of `leaf_UD`, on the device that `channel` leads to."""

    ids_U: Tensor
    sums: RowSums | None = None
    leaf_UD: Tensor | None = None
    channel: Channel | None = None

    def __bool__(self) -> bool:
        return bool(self.sums) or (self.leaf_UD is not None and self.leaf_UD.grad is not None)

    def on_the_way(self) -> "tuple[Tensor, torch.cuda.Event | None]":
        """Return the gradients on the host and, where they are still being copied, the event that ends that."""
        if self.sums is not None:
            return self.sums.part(0, self.ids_U.numel()), None
        assert self.leaf_UD is not None
        assert self.leaf_UD.grad is not None
        return (self.leaf_UD.grad, None) if self.channel is None else self.channel.start_receiving(self.leaf_UD.grad)


class RowGradients:
    """Collects lookups and hands out their gradients by unique row, those of `frozen` rows left out."""

    def __init__(self, num_rows: int, counters: Counters) -> None:
        self._counters = counters
        self.frozen = torch.tensor([], dtype=torch.int64)
        self._num_rows = num_rows
        self._lookups: list[_Pending] = []

    def clear(self) -> None:
        """Forget all lookups."""
        self._lookups = []

    def expect_sums(self, sums: RowSums) -> None:
        """Count in gradients that `sums` will have collected."""
        self._lookups.append(_Pending(sums.where.unique_U, sums=sums))

    def expect_leaf(self, ids_U: Tensor, leaf_UD: Tensor, channel: Channel | None = None) -> None:
        """Count in the gradient that a leaf will have got, on the host or where `channel` leads to."""
        self._lookups.append(_Pending(ids_U, leaf_UD=leaf_UD, channel=channel))

    def replace(self, ids_U: Tensor, grads_UD: Tensor) -> None:
        """Put merged (and perhaps clipped) gradients in the place of all collected ones."""
        leaf_UD = leaf_rows(len(grads_UD), grads_UD.shape[1], grads_UD.dtype)
        leaf_UD.grad = grads_UD
        self._lookups = [_Pending(ids_U, leaf_UD=leaf_UD)]

    def merged(self) -> tuple[Tensor, Tensor] | None:
        """Return (ids_U sorted and unique, grads_UD), or None when no row has a gradient."""
        lookups = [lookup for lookup in self._lookups if lookup]
        if not lookups:
            return None
        coming = [lookup.on_the_way() for lookup in lookups]
        start = time.perf_counter()
        for _, arrived in coming:
            if arrived is not None:
                arrived.synchronize()
        self._counters.d2h_ms += 1e3 * (time.perf_counter() - start)
        ids_U, grads_UD = lookups[0].ids_U, coming[0][0]
        if len(lookups) > 1:  # of several replicas or lookups: added up in their order
            where = sort_ids(short(torch.cat([lookup.ids_U for lookup in lookups]), self._num_rows))
            ids_U = where.unique_U
            grads_UD = sum_by_row(torch.cat([grads for grads, _ in coming]), where.order_N, where.starts_U)
        return self._without_frozen(ids_U, grads_UD)

    def parts(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (ids_C, grads_CD) of at most `size` rows at a time; together they are what `merged` returns."""
        lookups = [lookup for lookup in self._lookups if lookup]
        sums = lookups[0].sums if len(lookups) == 1 else None
        if sums is not None:
            ids_U = lookups[0].ids_U
            for start in range(0, ids_U.numel(), size):
                ids_C = ids_U[start : start + size]
                yield self._without_frozen(ids_C, sums.part(start, start + ids_C.numel()))
        elif (found := self.merged()) is not None:
            yield from zip(found[0].split(size), found[1].split(size), strict=True)

    def _without_frozen(self, ids_U: Tensor, grads_UD: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.frozen) and ids_U.numel():
            places = torch.searchsorted(ids_U, self.frozen).clamp_(max=ids_U.numel() - 1)
            places = places[ids_U[places] == self.frozen]
            if len(places):
                keep_U = torch.ones(ids_U.numel(), dtype=torch.bool).index_fill_(0, places, False)
                return ids_U[keep_U], grads_UD[keep_U]
        return ids_U, grads_UD
