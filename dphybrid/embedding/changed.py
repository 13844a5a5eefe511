"""Records which rows updates have changed, so that a checkpoint need write only those. Costs one byte per
row, set in each step.

Letters: V rows of a table, U unique rows of an update.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dphybrid.embedding.storage import zero_rows


class ChangedRows:
    """The rows of tables that were changed since the last `forget`. tensors: returns, by table, what an
    update changes (weight, then states).

    A change by anything else (a loaded state dict, an edit by hand) shows in the tensors' versions. The
    changed rows of that table are then unknown until the next `forget`.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Sequence[Tensor]]]) -> None:
        self._tensors = tensors
        # As numpy's arrays, whose indexing is faster than torch's `mark[rows] = 1`.
        self._marks = {
            name: zero_rows((len(weight),), torch.uint8).numpy() for name, (weight, *_) in tensors().items()
        }
        self._expected_versions: dict[str, list[int]] = {}
        self._updates: dict[str, int] = {}
        self.forget()

    def add(self, name: str, rows_U: np.ndarray) -> None:
        """Record an update of these rows of a table. The update must have raised each of the table's tensor
        versions by one."""
        if name in self._marks:
            self._marks[name][rows_U] = 1
            self._updates[name] += 1

    def forget(self) -> None:
        """Reset: from now on, no row counts as changed."""
        # Not for new marks: they are zeros already, and writing to them would allocate their memory.
        if self._expected_versions:
            for mark_V in self._marks.values():
                mark_V.fill(0)
        self._updates = dict.fromkeys(self._marks, 0)
        self._expected_versions = self._versions()

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Reset, with these rows (int64) of each table counted as changed."""
        self.forget()
        for name, rows_U in rows.items():
            self._marks[name][rows_U.numpy()] = 1
            self._updates[name] = 1
        self._expected_versions = self._versions()

    def untouched(self) -> set[str]:
        """Return the tables that nothing has changed since the last `forget`, such as frozen ones."""
        return {name for name, count in self._updates.items() if not count} - self.unknown()

    def unknown(self) -> set[str]:
        """Return the tables that something other than an update has changed since the last `forget`, or that
        have got states since."""
        expected = self._expected_versions
        return {name for name, versions in self._versions().items() if versions != expected[name]}

    def _versions(self) -> dict[str, list[int]]:
        """Return the versions that each table's tensors would have without the updates."""
        tensors = self._tensors()
        return {
            name: [tensor._version - self._updates[name] for tensor in tensors[name]] for name in self._marks
        }

    def rows(self) -> dict[str, Tensor | None]:
        """Return the changed rows of each table (int64, ascending), or None for a table whose changes are
        unknown."""
        unknown = self.unknown()
        return {
            name: None if name in unknown else torch.from_numpy(np.flatnonzero(mark_V.view(np.bool_)))
            for name, mark_V in self._marks.items()
        }
