"""Which rows updates have changed, so that a checkpoint need not hold the others again: a byte a row, set in
the step.

Letters: V rows of a table, U unique rows of an update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dphybrid.embedding.storage import zero_rows


@dataclass
class _Table:
    """tensors: what an update changes: rows, then their states. versions: theirs when `updates` was 0."""

    tensors: Sequence[Tensor]
    mark_V: Tensor
    updates: int = 0
    versions: list[int] = field(default_factory=list)


class ChangedRows:
    """The rows of tables that were changed since the last `forget`. tables: name -> what an update changes.

    A change that is no update (a loaded state dict, an edit by hand) is noticed by the tensors' versions;
    nothing is known of that table then, until the next `forget`.
    """

    def __init__(self, tables: Mapping[str, Sequence[Tensor]]) -> None:
        self._tables = {
            name: _Table(tensors, zero_rows((len(tensors[0]),), torch.uint8))
            for name, tensors in tables.items()
        }
        self.forget()

    def add(self, name: str, rows_U: Tensor) -> None:
        """An update changed these rows of a table, and each of its tensors' versions by one."""
        table = self._tables.get(name)
        if table is not None:
            table.mark_V.index_fill_(0, rows_U, 1)
            table.updates += 1

    def forget(self) -> None:
        """Begin anew: nothing has changed since now."""
        for table in self._tables.values():
            if table.updates or table.versions:
                table.mark_V.zero_()
            table.updates, table.versions = 0, [tensor._version for tensor in table.tensors]

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Begin anew, with these rows (int64) of each table as changed."""
        self.forget()
        for name, rows_U in rows.items():
            self._tables[name].mark_V.index_fill_(0, rows_U, 1)

    def rows(self) -> dict[str, Tensor | None]:
        """Return the changed rows of each table (int64, ascending), None where they are not known."""
        found: dict[str, Tensor | None] = {}
        for name, table in self._tables.items():
            known = [tensor._version - table.updates for tensor in table.tensors] == table.versions
            marked = np.flatnonzero(table.mark_V.numpy().view(np.bool_)) if known else None
            found[name] = None if marked is None else torch.from_numpy(marked)
        return found
