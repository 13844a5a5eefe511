"""Which region the rows of a table go to: the seam between tables in host memory and regions.

Neither package imports the other: a table is whatever has the two methods of `RowSource`.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dphybrid.parallel.splits import split_sizes
from dphybrid.util.errors import UserError

if TYPE_CHECKING:
    from dphybrid.parallel.data_parallel import DataParallel


class RowSource(Protocol):
    """A table that delivers rows to the replicas of a region; `HostEmbedding` is one."""

    def place_on(self, devices: Sequence[torch.device], sizes_of: Callable[[int], Sequence[int]], /) -> None:
        """Set where `replica_rows` delivers. sizes_of: from the rows of a batch to those of each share."""
        ...

    def replica_rows(self, ids: Tensor, /) -> list[Tensor]:
        """Return each used replica's rows of its share of `ids`, on its device."""
        ...


_regions: "weakref.WeakKeyDictionary[RowSource, weakref.ref[DataParallel]]" = weakref.WeakKeyDictionary()


def place(table: RowSource, region: "DataParallel") -> None:
    """Deliver the rows of `table` to the replicas of `region`, from the first call on. Raises UserError for a
    table that delivers to other devices of another region."""
    known = _regions.get(table)
    before = None if known is None else known()
    if before is region:
        return
    if region.dim != 0:
        raise UserError(
            f"DataParallel.rows: rows are split on dim 0, and this region splits on dim {region.dim}; use "
            "dim=0, or look up with table(ids)"
        )
    if before is None:
        table.place_on(region.devices.replicas, partial(_sizes, len(region.devices), region.weights))
        _regions[table] = weakref.ref(region)
    elif (before.devices.replicas, before.weights) != (region.devices.replicas, region.weights):
        raise UserError(
            f"DataParallel.rows: the table's rows go to {before.devices.text} already, for another region, "
            f"and this one is on {region.devices.text}; give both the same devices and weights, or look up "
            "with table(ids) for one of them"
        )


def _sizes(count: int, weights: Sequence[float] | None, rows: int) -> list[int]:
    return split_sizes(rows, count, weights) if rows else [0]
