"""A table's lookups for replicas: prepared ahead of their use, repaired where an update has changed their
rows since.

Letters: N ids of one replica's share, U unique ids among them, C rows changed meanwhile, D width of a row, V
rows of the table.

Rows change only through updates, which put the ids of each on record together with the table tensor's version
before and after. A lookup carries the version read before its gathering began, so every update that may have
run beside the gathering comes later and its rows are read again. A change that is not on record (a loaded
state dict, an edit by hand) makes all rows be read again.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dphybrid.embedding import native
from dphybrid.embedding.counters import Counters
from dphybrid.embedding.lookup import all_in_range, no_row, sort_ids, whole_numbers
from dphybrid.embedding.plans import Halves, Rows, UpdatePlan
from dphybrid.embedding.replicas import Channel, Share, SizesOf
from dphybrid.embedding.storage import zero_rows
from dphybrid.util.errors import UserError
from dphybrid.util.labels import labelled

if TYPE_CHECKING:
    from dphybrid.embedding.table import HostEmbedding


@dataclass
class Lookup:
    """One batch's ids of one table, any shape, and each replica's rows as they were at `version` of the
    table."""

    ids: Tensor
    shares: list[Share]
    version: int
    dedup_ms: float
    known: tuple[int, int, Sequence[Tensor]] | None = None
    """Which rows the update from one version of the table to another has changed, by share: the worker has
    found that out. No later update changed any."""

    @property
    def num_unique(self) -> int:
        """Unique ids, counted by replica."""
        return sum(len(share.where.unique_U) for share in self.shares)


class LookupsAhead:
    """What a table's lookups need to know of replicas, of batches to come and of updates.

    Methods are told the table: did this refer to it, only the garbage collector would free a table, and two
    runs' tables would be there at once.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._channels: list[Channel] = []
        self._sizes_of: SizesOf | None = None
        self._expected: list[Lookup] = []
        self._changes: deque[tuple[int, int, Tensor]] | None = None
        self._marks: list[Tensor | None] = [None, None]
        self._rest: Future[float] | None = None
        self.later: Callable[[Callable[[], float]], Future[float]] | None = None

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Say where replicas are; see `HostEmbedding.place_on`."""
        if len(devices) == 1 and devices[0].type == "cpu":  # rows are there already
            self._channels, self._sizes_of = [], None
            return
        self._channels = [Channel(device, self._counters) for device in devices]
        self._sizes_of = sizes_of

    @property
    def is_on_gpus(self) -> bool:
        """Are rows delivered to GPUs?"""
        return any(channel.device.type == "cuda" for channel in self._channels)

    @property
    def is_placed(self) -> bool:
        """Are rows delivered to replicas?"""
        return self._sizes_of is not None

    def prepare(self, table: "HostEmbedding", ids: Tensor, threads: int | None = 1) -> Lookup | None:
        """Check `ids`, find each replica's unique ones and send their rows on the way; None where none are
        delivered.

        May run in another thread, beside updates; then with `threads` 1. Raises UserError for ids that are no
        rows.
        """
        if self._sizes_of is None:  # rows are read from the table itself when they are used
            return None
        ids = whole_numbers(ids, table.name)
        if not all_in_range(ids, table.num_rows):
            raise no_row(ids, table.num_rows, table.name)
        like = torch.empty(0, table.dim, dtype=table.row_dtype)
        start = time.perf_counter()
        each = ids.split(list(self._sizes_of(len(ids))))
        wheres = [sort_ids(ids_BX.reshape(-1), table.num_rows) for ids_BX in each]
        dedup_ms = 1e3 * (time.perf_counter() - start)
        self._wait()  # else what waits would have to be read again
        version = table.rows_VD._version  # before any row is read
        shares = [
            channel.send(
                where, ids_BX.shape, lambda ids_U, out_UD: _read(table, ids_U, threads, out_UD), like
            )
            for channel, where, ids_BX in zip(self._channels, wheres, each, strict=False)
        ]
        return Lookup(ids, shares, version, dedup_ms)

    def plan(self, table: "HostEmbedding", lookups: Sequence[Lookup]) -> UpdatePlan | None:
        """Return what is known of the update that a batch with these prepared lookups will lead to; None
        without one. For a worker."""
        if not lookups:
            return None
        row_bytes = table.dim * table.row_dtype.itemsize
        return UpdatePlan(lookups, table.num_rows, table.gradients.frozen, row_bytes)

    def link(self, table: "HostEmbedding", plan: UpdatePlan, following: Sequence[Lookup]) -> None:
        """Tell a plan of the next batch's lookups. For a worker."""
        if following:
            plan.link(following, self._mark_of(1, table.num_rows))

    def wait_for(self, rest: Future[float]) -> None:
        """Take the rows as updated when this has ended, which returns the table's share of its ms."""
        self._rest = rest

    def finish(self) -> None:
        """Wait until all rows are updated. Raises what went wrong with those that were updated later."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._counters.later_ms += rest.result()

    def _wait(self) -> None:
        rest = self._rest
        if rest is not None:
            wait([rest])

    def expect(self, lookups: Sequence[Lookup]) -> None:
        """Use these prepared lookups for the next calls with equal ids, each once; earlier ones are
        forgotten."""
        self._expected = list(lookups)

    def lookup_of(self, table: "HostEmbedding", ids: Tensor) -> Lookup:
        """Return the lookup of ids, prepared or done now, with the rows as the table holds them now."""
        for place, lookup in enumerate(self._expected):
            if (
                ids.shape == lookup.ids.shape
                and ids.dtype == torch.int64
                and torch.equal(ids.cpu(), lookup.ids)
            ):
                self._counters.prepared += lookup.num_unique
                del self._expected[place]
                self.repair(table, lookup)
                return lookup
        self.finish()
        made = self.prepare(table, ids, threads=None)
        assert made is not None
        return made

    def shares_of(self, lookup: Lookup) -> Iterable[tuple[Channel, Share]]:
        """Yield each used replica's channel and share."""
        return zip(self._channels, lookup.shares, strict=False)

    def settle_times(self) -> None:
        """Add the durations of finished copies to the counters."""
        for channel in self._channels:
            channel.settle_times()

    def record_changes(self, updates: int) -> None:
        """Remember which rows the last `updates` updates changed, each in up to two parts (0: no longer), so
        that `repair` can be selective."""
        self._changes = deque(maxlen=2 * updates) if updates else None

    @property
    def is_recording(self) -> bool:
        """Is `changed` of use?"""
        return self._changes is not None

    def changed(self, before: int, after: int, ids_U: Tensor) -> None:
        """Put an update of the rows ids_U, from version `before` to `after`, on record."""
        if self._changes is not None:
            self._changes.append((before, after, ids_U))

    def repair(self, table: "HostEmbedding", lookup: Lookup) -> None:
        """Bring the rows of prepared shares to what the table holds now, sending again no more than what was
        changed.

        A row that an update wrote while it was being read may be torn: it belongs to a change after the
        lookup's version, so it is read again.
        """
        now, known_here = table.rows_VD._version, lookup.known
        # Whoever else reads or changes the table has waited for the rest before, so nothing has come between.
        if known_here is not None and self._rest is not None and now - known_here[1] <= 1:
            now = known_here[1]
        else:
            self.finish()
            now, known_here = table.rows_VD._version, None
        if now == lookup.version:
            return
        start = time.perf_counter()
        changes = [change for change in list(self._changes or ()) if lookup.version < change[1] <= now]
        # Recorded changes must follow each other without a gap, from the lookup's version or before to now.
        befores, afters = [before for before, _, _ in changes], [after for _, after, _ in changes]
        known = bool(changes) and befores[0] <= lookup.version and [*befores[1:], now] == afters
        uniques = [share.where.unique_U for share in lookup.shares]
        places: Sequence[Tensor] = [torch.arange(len(ids_U)) for ids_U in uniques] if not known else []
        if known and known_here is not None and known_here[0] == lookup.version:
            places = known_here[2]
        elif known:
            places = self._changed_places(changes, uniques, table.num_rows)
        for (channel, share), ids_U, places_C in zip(self.shares_of(lookup), uniques, places, strict=True):
            if len(places_C):
                channel.mend(share, places_C, partial(_read, table, ids_U.index_select(0, places_C), None))
        lookup.version, lookup.known = now, None
        self._counters.repaired += sum(len(places_C) for places_C in places)
        self._counters.repair_ms += 1e3 * (time.perf_counter() - start)

    def _changed_places(
        self, changes: list[tuple[int, int, Tensor]], uniques: list[Tensor], num_rows: int
    ) -> list[Tensor]:
        """Return, for each tensor of unique ids, the places of those that were changed."""
        mark_V = self._mark_of(0, num_rows)
        for _, _, changed in changes:
            mark_V.index_fill_(0, changed, 1)
        places = [mark_V.index_select(0, unique_U).nonzero().squeeze(1) for unique_U in uniques]
        for _, _, changed in changes:
            mark_V.index_fill_(0, changed, 0)
        return places

    def _mark_of(self, thread: int, num_rows: int) -> Tensor:
        """Return zeros, a byte a row, for the main thread (0) or a worker (1)."""
        mark_V = self._marks[thread]
        if mark_V is None:  # takes memory where it is touched
            mark_V = self._marks[thread] = zero_rows((num_rows,), torch.uint8)
        return mark_V


def update_in_halves(
    tables: Sequence["HostEmbedding"], halves: Sequence[Halves], update: Callable[[Sequence[Rows]], None]
) -> None:
    """Update the rows that the next batch needs, and have the others updated later, by another thread.

    halves: of each table. update: of some rows of each table; raises the version of every table by one.
    """

    def half(rows_T: Sequence[Rows]) -> list[tuple[int, int]]:
        before = [table.rows_VD._version for table in tables]
        update(rows_T)
        versions = [(version, table.rows_VD._version) for version, table in zip(before, tables, strict=True)]
        for table, change, rows in zip(tables, versions, rows_T, strict=True):
            table.ahead.changed(*change, rows.ids_U)
        return versions

    changes = half([each.first for each in halves])
    for each, change in zip(halves, changes, strict=True):
        for lookup, places in zip(each.following, each.places, strict=True):
            lookup.known = (*change, places)

    def rest() -> float:
        start = time.perf_counter()
        with labelled("update later"):
            half([each.rest for each in halves])
        return 1e3 * (time.perf_counter() - start) / len(tables)

    later = tables[0].ahead.later
    assert later is not None
    future = later(rest)
    for table in tables:
        table.ahead.wait_for(future)


def _read(
    table: "HostEmbedding", ids_U: Tensor, threads: int | None, out_XD: Tensor, places_U: Tensor | None = None
) -> None:
    if not native.gather(table.rows_VD, ids_U, out_XD, threads, places_N=places_U):
        raise UserError(f"table {table.name!r}: the table became smaller while its rows were read")
