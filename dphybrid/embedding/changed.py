"""Which rows updates have changed: a checkpoint need not hold the others again, a lookup that was prepared
ahead need not read them again. Each row has the number of the update that changed it last.

Letters: V rows of a table, U unique rows of an update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from dphybrid.embedding.storage import zero_rows


@dataclass
class Record:
    """Updates of one weight. users: who wants to know of them; without one there is no record.

    Each update raises the weight's version by one. From the version `first` to `last` nothing but updates has
    changed it: what else does (a loaded state dict, an edit by hand) raises the version, too, and the next
    update begins anew. shift: from the number of an update to the version after it.
    """

    users: int = 0
    first: int = -1
    last: int = -1
    shift: int = 0
    stamp_V: Tensor | None = field(default=None, repr=False)

    def add(self, stamp_V: Tensor, number: int, before: int, after: int) -> None:
        """Note the update `number`, which has put it into stamp_V. before, after: the weight's versions."""
        if stamp_V is not self.stamp_V or before != self.last or after - number != self.shift:
            self.stamp_V, self.first, self.shift = stamp_V, before, after - number
        self.last = after

    def changed_since(self, version: int, now: int, ids_U: Tensor | None = None) -> Tensor | None:
        """Return the rows (of ids_U: their places) that were changed from one version of the weight to the
        present one, ascending; None where that is not known."""
        if version == now:
            return torch.empty(0, dtype=torch.int64)
        if self.stamp_V is None or not self.first <= version or self.last != now:
            return None
        stamp_X = self.stamp_V if ids_U is None else self.stamp_V.index_select(0, ids_U)
        return (stamp_X > version - self.shift).nonzero().squeeze(1)


class Stamps:
    """The numbers of the last updates of tables that are updated together, one table after the other."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._all = zero_rows((sum(lengths),), torch.int32)
        self.of_tables = self._all.split(list(lengths))
        self.number = 0

    def add(self, keys_U: Tensor) -> None:
        """An update changed these rows; a row's key is its number plus the rows of all tables before."""
        self.number += 1
        self._all.index_fill_(0, keys_U, self.number)


class ChangedRows:
    """The rows of each table that were changed since the last `forget`. tables: by name, their record, and
    what an update changes: the rows, then their states.

    A change of a state that is no update is noticed by its version, as those of rows are; nothing is known of
    that table then, until the next `forget`.
    """

    def __init__(self, tables: Mapping[str, tuple[Record, Sequence[Tensor]]]) -> None:
        self._tables = tables
        for record, _ in tables.values():
            record.users += 1
        self.forget()

    def forget(self, but: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Begin anew: nothing has changed until now, but for these rows (int64) of the tables."""
        self._before, self._then = but, self.versions()

    def rows(self) -> dict[str, Tensor | None]:
        """Return the changed rows of each table (int64, ascending), None where they are not known."""
        found: dict[str, Tensor | None] = {}
        for (name, (record, _)), then, now in zip(
            self._tables.items(), self._then, self.versions(), strict=True
        ):
            # an update raises the versions of rows and states alike
            alike = len({new - old for old, new in zip(then, now, strict=True)}) == 1
            changed = record.changed_since(then[0], now[0]) if alike else None
            if changed is not None and name in self._before:
                changed = torch.cat([self._before[name], changed]).unique()
            found[name] = changed
        return found

    def versions(self) -> list[list[int]]:
        """Return numbers that differ when anything has changed since."""
        return [[tensor._version for tensor in tensors] for _, tensors in self._tables.values()]
