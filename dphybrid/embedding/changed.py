"""Which rows updates have changed, so that a checkpoint need not hold the others again: a byte a row, set in
the step.

Letters: V rows of a table, U unique rows of an update.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dphybrid.embedding.storage import zero_rows


class ChangedRows:
    """The rows of tables that were changed since the last `forget`. tables: name -> what an update changes.

    A change that is no update (a loaded state dict, an edit by hand) is noticed by the tensors' versions;
    nothing is known of that table then, until the next `forget`.
    """

    def __init__(self, tables: Mapping[str, Sequence[Tensor]]) -> None:
        self._tables = tables
        self._marks = {name: zero_rows((len(held[0]),), torch.uint8) for name, held in tables.items()}
        self._expected: dict[str, list[int]] = {}
        self.forget()

    def add(self, name: str, rows_U: Tensor) -> None:
        """An update changed these rows of a table, and each of its tensors' versions by one."""
        if name in self._tables:
            self._marks[name].numpy()[rows_U.numpy()] = 1
            self._expected[name] = [version + 1 for version in self._expected[name]]

    def forget(self) -> None:
        """Begin anew: nothing has changed since now."""
        if self._expected:  # at first marks are zeros, which have no memory yet
            for mark_V in self._marks.values():
                mark_V.zero_()
        self._expected = {name: [tensor._version for tensor in held] for name, held in self._tables.items()}

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Begin anew, with these rows (int64) of each table as changed."""
        self.forget()
        for name, rows_U in rows.items():
            self._marks[name].numpy()[rows_U.numpy()] = 1

    def rows(self) -> dict[str, Tensor | None]:
        """Return the changed rows of each table (int64, ascending), None where they are not known."""
        return {
            name: torch.from_numpy(np.flatnonzero(self._marks[name].numpy().view(np.bool_)))
            if [tensor._version for tensor in held] == self._expected[name]
            else None
            for name, held in self._tables.items()
        }
