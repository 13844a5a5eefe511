"""Many tables of one width in one: each step sorts, gathers and updates once instead of once per table.

Letters: B samples, F columns (one id column a table here), D width of a row.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dphybrid.embedding.lookup import not_a_row, whole_numbers
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.errors import UserError


class HostEmbeddingCollection(HostEmbedding):
    """One table that holds the rows of several (name -> number of rows), one table after the other.

        tables = HostEmbeddingCollection({"user": 1_000_000, "item": 50_000}, 64)
        rows_BFD = region.rows(tables, tables.flat_ids(ids_BF))

    Args:
        tables: Number of rows of each table, by name.
        dim: Width of all rows.
        options: Further arguments of `HostEmbedding`; its rows are those of all tables together.
    """

    def __init__(self, tables: Mapping[str, int], dim: int, **options: Any) -> None:
        if not tables or min(tables.values()) < 1:
            raise UserError(f"collection: tables={dict(tables)}; give tables with at least one row each")
        starts = [*accumulate(tables.values(), initial=0)]
        super().__init__(starts.pop(), dim, **options)
        self.tables = dict(tables)
        self._starts_F = torch.tensor(starts, device="cpu")  # no buffer: ids stay on the host

    def flat_ids(self, ids_BF: Tensor) -> Tensor:
        """Return the ids of the whole table (B, F) int64 for each table's own ids, in the order of the
        tables. Raises UserError for an id that is not a row of its table: in the whole table, it would be a
        row of the next one."""
        ids_BF = whole_numbers(ids_BF, self.name)
        if ids_BF.shape[-1] != len(self.tables):
            raise UserError(
                f"ids have shape {tuple(ids_BF.shape)}; give {len(self.tables)} columns, one per table"
            )
        for (name, num_rows), ids_B in zip(self.tables.items(), ids_BF.unbind(-1), strict=True):
            # torch.export cannot record a check that raises: an exported model gets ids that are rows.
            is_checked = not torch.compiler.is_exporting()
            if is_checked and bool(((ids_B < 0) | (ids_B >= num_rows)).any()):
                raise not_a_row(ids_B, num_rows, name)
        return ids_BF + self._starts_F
