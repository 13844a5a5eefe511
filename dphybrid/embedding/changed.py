"""Which rows updates have changed, so that a checkpoint need not hold the others again: a byte a row, set in
the step.

Letters: V rows of tables that are updated together, U unique rows of an update.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dphybrid.embedding.storage import zero_rows

_Member = tuple[str, Sequence[Tensor]]
"""Name of a table, and what an update of it changes: its rows, then their states."""


@dataclass
class _Group:
    """Tables that are updated together, one after the other in `mark_V`. versions: of each tensor when
    `updates` was 0."""

    members: Sequence[_Member]
    mark_V: Tensor
    updates: int = 0
    versions: list[int] = field(default_factory=list)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensors in self.members for tensor in tensors]


class ChangedRows:
    """The rows that were changed since the last `forget`. groups: members by the key that `add` names.

    A change that is no update (a loaded state dict, an edit by hand) is noticed by the tensors' versions;
    nothing is known of those tables then, until the next `forget`.
    """

    def __init__(self, groups: Mapping[Hashable, Sequence[_Member]]) -> None:
        self._groups = {
            key: _Group(members, zero_rows((sum(len(tensors[0]) for _, tensors in members),), torch.uint8))
            for key, members in groups.items()
        }
        self.forget()

    def add(self, key: Hashable, keys_U: Tensor) -> None:
        """An update changed these rows of a group, and each of its tensors' versions by one. A row's key is
        its number plus the rows of all members before. Of tables that were not updated together at first
        nothing is known then, as their versions say."""
        if (group := self._groups.get(key)) is not None:
            group.mark_V.index_fill_(0, keys_U, 1)
            group.updates += 1

    def forget(self) -> None:
        """Begin anew: nothing has changed since now."""
        for group in self._groups.values():
            if group.updates or group.versions:
                group.mark_V.zero_()
            group.updates, group.versions = 0, [tensor._version for tensor in group.tensors]

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Begin anew, with these rows (int64) of each table as changed."""
        self.forget()
        for group in self._groups.values():
            for name, mark in self._marks(group):
                if name in rows:
                    mark.index_fill_(0, rows[name], 1)

    def rows(self) -> dict[str, Tensor | None]:
        """Return the changed rows of each table (int64, ascending), None where they are not known."""
        found: dict[str, Tensor | None] = {}
        for group in self._groups.values():
            now = [tensor._version - group.updates for tensor in group.tensors]
            for name, mark in self._marks(group):
                found[name] = (
                    torch.from_numpy(np.flatnonzero(mark.numpy().view(np.bool_)))
                    if now == group.versions
                    else None
                )
        return found

    def versions(self) -> list[int]:
        """Return numbers that differ when anything has changed since."""
        return [tensor._version for group in self._groups.values() for tensor in group.tensors]

    def _marks(self, group: _Group) -> list[tuple[str, Tensor]]:
        lengths = [len(tensors[0]) for _, tensors in group.members]
        names = [name for name, _ in group.members]
        return list(zip(names, group.mark_V.split(lengths), strict=True))
