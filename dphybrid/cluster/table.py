"""A table whose rows are spread over all ranks. It replaces a host table; models look rows up as before.

Letters: N ids of a lookup, U unique rows of it, D width of a row, V rows of this rank.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.cluster.ranks import Ranks
from dphybrid.cluster.sharding import RowShards
from dphybrid.cluster.spread import Spread
from dphybrid.config import TableConfig
from dphybrid.embedding import HostEmbedding, find_tables
from dphybrid.embedding.lookup import Occurrences, row_numbers, sort_ids
from dphybrid.embedding.replicas import DeviceRows, SizesOf
from dphybrid.util.errors import UserError


@dataclass(frozen=True)
class _Lookup:
    """The lookup of a step, kept for its update. rows_UD: from TorchRec, whose backward updates the rows.
    leaf_UD: the same values, which collect the model's gradients."""

    where: Occurrences
    rows_UD: Tensor
    leaf_UD: Tensor


class _SpreadTable(HostEmbedding):
    """A host table whose rows are spread over all ranks. Every rank must look up at the same time.

    table: the one that it replaces, which has no rows of its own. spread: rows and states, for checkpoints.
    `weight` is empty; `all_rows(weight)` is a stand-in for the rows of all ranks, to be read and written in
    slices by rank 0 while the others serve. lr: set it before a lookup.
    """

    def __init__(self, table: HostEmbedding, ranks: Ranks, config: TableConfig, batch_rows: int) -> None:
        # Not HostEmbedding.__init__, which would allocate all rows in this process.
        nn.Module.__init__(self)
        self.name = table.name
        self.padding_idx, self.start = table.padding_idx, table.start
        self.counters, self.ahead, self._padding = table.counters, table.ahead, table._padding
        self._gates, self._placed = table._gates, None
        self._path, self.out_dtype = None, torch.float32
        self.ahead.place_on([torch.device("cpu")], lambda rows: [rows])  # no rows are prefetched to a GPU
        self._ranks, self.lr, self._num_rows = ranks, config.lr, table.num_rows
        self._lookup: _Lookup | None = None
        shards = RowShards(ranks, table.num_rows, table.dim, table.name, config, batch_rows)
        self._shards = shards
        pieces = [shards.rows_VD] + ([] if shards.sum_V is None else [shards.sum_V])
        bounds = ranks.all_gather((shards.first, shards.first + len(shards.rows_VD)))
        self.spread = Spread(ranks, pieces, bounds)
        whole = self.spread.tensors()
        self.weight = nn.Parameter(torch.empty(0, table.dim))  # row optimizers make states of what is trained
        self._info.make_states, self._info.stored = self._fbgemm_states, whole[0]
        self._info.padding = table._info.padding
        self._states: dict[str, Any] = {"sum": whole[1]} if len(whole) > 1 else {}
        self.bytes_sent = self.look_up_ms = 0.0

    @property
    def num_rows(self) -> int:
        """Number of rows of all ranks."""
        return self._num_rows

    def fill(self) -> None:
        """Give this rank's rows the initial values that they would have in one process."""
        if len(self._shards.rows_VD):
            self.start.write(self._shards.rows_VD, self._shards.first)

    def _fbgemm_states(self, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """Return FBGEMM's states, under the names that the row optimizer of one process uses."""
        # Not by shapes: those of `wanted` are of this process's weight, which has no rows.
        own = {name: state.dtype for name, state in self._states.items()}
        assert own == {name: dtype for name, (_, dtype) in wanted.items()}, (own, wanted)
        return dict(self._states)

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Do nothing: a rank has one device, to which rows always come."""

    def forward(self, ids: Tensor, *, by_replica: bool = False, to: torch.device | None = None) -> Any:
        """Return the rows of `ids` (any shape, int64) as (*ids.shape, dim) on the rank's device, or on the
        device `to`.

        Raises UserError for ids that are not rows, and for a second lookup in a step.
        """
        rows = self._look_up_here(ids)
        rows = rows if to is None else rows.to(to)
        return [rows] if by_replica else rows

    def _look_up_here(self, ids: Tensor) -> Tensor:
        ids = row_numbers(ids, self.num_rows, self.name)
        trained = torch.is_grad_enabled()
        if trained and self._lookup is not None:
            raise UserError(
                f"table {self.name!r}: is looked up twice in a step, but with cluster.ranks each lookup "
                "would update its rows separately; look all ids up at once"
            )
        # Each row once: less than half of the bytes between ranks. TorchRec's own dedup fails on the CPU.
        where = sort_ids(ids.reshape(-1), self.num_rows)
        start = time.perf_counter()
        rows_UD = self._shards.look_up(where.unique_U, self.lr)
        leaf_UD = rows_UD.detach()
        device = leaf_UD.device
        if trained:
            self.look_up_ms += 1e3 * (time.perf_counter() - start)
            leaf_UD.requires_grad_()
            self._lookup = _Lookup(where, rows_UD, leaf_UD)
            self.counters.unique += len(where.unique_U)
        first, stop = self.spread.bounds[self._ranks.rank]
        away = len(where.unique_U) - int(((where.unique_U >= first) & (where.unique_U < stop)).sum())
        # For each row of another rank: its id is sent, the row comes back, in training its gradient is sent.
        self.bytes_sent += away * (8 + 4 * self.dim * (2 if trained else 1))
        rows_ND = DeviceRows.apply(leaf_UD, *(each.to(device) for each in where.indices()))
        return rows_ND.view(*ids.shape, self.dim)

    def gradient_sum(self) -> Tensor:
        """Return the sum of the gradients of this rank's lookup, which is finite only if each of them is."""
        if self._lookup is None or self._lookup.leaf_UD.grad is None:
            return torch.zeros((), device=self._ranks.device)
        return self._lookup.leaf_UD.grad.sum()

    def bad_gradient(self) -> int | None:
        """Return the first row of this rank's lookup whose gradient is NaN or infinite, or None."""
        if self._lookup is None or self._lookup.leaf_UD.grad is None:
            return None
        bad_U = ~torch.isfinite(self._lookup.leaf_UD.grad).all(1).cpu()
        return int(self._lookup.where.unique_U[bad_U][0]) if bool(bad_U.any()) else None

    def update(self, on_gradient: Callable[[float], float] | None) -> None:
        """Update the rows of this step's lookup. All ranks must call it; see `RowShards.update`."""
        lookup, self._lookup = self._lookup, None
        if lookup is None:
            raise UserError(f"table {self.name!r}: was not looked up in this step")
        grads_UD = lookup.leaf_UD.grad
        # Zeros instead of skipping: the backward is a joint operation, for which the other ranks wait.
        if grads_UD is None:
            grads_UD = torch.zeros_like(lookup.leaf_UD)
        if self._info.padding is not None:
            is_padding_U = lookup.where.unique_U == self._info.padding
            grads_UD = grads_UD.masked_fill(is_padding_U.to(grads_UD.device)[:, None], 0.0)
        self._shards.update(lookup.rows_UD, grads_UD, on_gradient)


def spread_table(model: nn.Module, ranks: Ranks, config: TableConfig, batch_rows: int) -> _SpreadTable:
    """Replace the model's only table by one that is spread over all ranks; return the new one."""
    ((name, table),) = find_tables(model).items()
    spread = _SpreadTable(table, ranks, config, batch_rows)
    # Every reference to the old table, as several modules may share it.
    for module in list(model.modules()):
        for child, held in list(module.named_children()):
            if held is table:
                setattr(module, child, spread)
    assert name in find_tables(model)
    return spread
