"""A table's lookups for replicas: prepared ahead of their use, repaired where an update has changed their
rows since.

Letters: N ids of one replica's share, U unique ids among them, C rows changed meanwhile, D width of a row, V
rows of the table.

Rows change only through updates, which put the ids of each on record together with the weight's version
before and after. A lookup carries the version read before its gathering began, so every update that may have
run beside the gathering comes later and its rows are read again. A change that is not on record (a loaded
state dict, an edit by hand) makes all rows be read again. What is written through `.data` or numpy raises no
version, so a prepared lookup does not see it.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dphybrid.embedding import native
from dphybrid.embedding.lookup import Counters, row_numbers, sort_ids
from dphybrid.embedding.replicas import Channel, Share, SizesOf
from dphybrid.embedding.storage import zero_rows
from dphybrid.util.errors import UserError


@dataclass
class Lookup:
    """One batch's ids of one table, any shape, and each replica's rows as they were at `version` of the
    weight."""

    ids: Tensor
    shares: list[Share]
    version: int
    dedup_ms: float

    @property
    def num_unique(self) -> int:
        """Unique ids, counted by replica."""
        return sum(len(share.where.unique_U) for share in self.shares)


class LookupsAhead:
    """What a table's lookups need to know of replicas, of batches to come and of updates.

    changes: of each update on record its versions before and after, and its rows; None: there is no record.

    Methods are given the weight: did this refer to the table, only the garbage collector would free it.
    """

    def __init__(self, name: str, counters: Counters) -> None:
        self._name, self._counters = name, counters
        self._channels: list[Channel] = []
        self._sizes_of: SizesOf | None = None
        self._expected: list[Lookup] = []
        self.changes: deque[tuple[int, int, Tensor]] | None = None
        self._mark: Tensor | None = None

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Set where replicas are; see `HostEmbedding.place_on`."""
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

    def prepare(self, weight: Tensor, ids: Tensor, threads: int | None = 1) -> Lookup | None:
        """Check `ids`, find each replica's unique ones and send their rows on the way; None where none are
        delivered.

        May run in another thread, beside updates; then with `threads` 1. Raises UserError for ids that are no
        rows of the table.
        """
        if self._sizes_of is None:  # rows are read from the table itself when they are used
            return None
        ids = row_numbers(ids, len(weight), self._name)
        if not ids.dim():
            raise UserError(f"table {self._name!r}: one id, {int(ids)}, cannot be split; give ids (B, ...)")
        like = torch.empty((0, weight.shape[1]), dtype=native.real_dtype(weight.dtype), device="cpu")
        start = time.perf_counter()
        each = ids.split(list(self._sizes_of(len(ids))))
        wheres = [sort_ids(ids_BX.reshape(-1), len(weight)) for ids_BX in each]
        dedup_ms = 1e3 * (time.perf_counter() - start)
        version = weight._version  # before any row is read
        shares = [
            channel.send(where, ids_BX.shape, partial(native.gather, weight.detach(), threads), like)
            for channel, where, ids_BX in zip(self._channels, wheres, each, strict=False)
        ]
        return Lookup(ids, shares, version, dedup_ms)

    def expect(self, lookups: Sequence[Lookup]) -> None:
        """Use these prepared lookups for the next calls with equal ids, each once; earlier ones are
        forgotten."""
        self._expected = list(lookups)

    def lookup_of(self, weight: Tensor, ids: Tensor) -> Lookup:
        """Return the lookup of ids, prepared or done now, with the rows as the table holds them now."""
        # by equality, not by identity: a batch may have been copied or moved on its way to `forward`
        for place, lookup in enumerate(self._expected):
            if (
                ids.shape == lookup.ids.shape
                and ids.dtype == torch.int64
                and torch.equal(ids.cpu(), lookup.ids)
            ):
                self._counters.prepared += lookup.num_unique
                del self._expected[place]
                self.repair(weight, lookup)
                return lookup
        made = self.prepare(weight, ids, threads=None)
        assert made is not None
        return made

    def settle_times(self) -> None:
        """Add the durations of finished copies to the counters."""
        for channel in self._channels:
            channel.settle_times()

    def record_changes(self, updates: int) -> None:
        """Remember which rows the last `updates` updates changed (0: no longer), so that `repair` can be
        selective."""
        self.changes = deque(maxlen=updates) if updates else None

    def repair(self, weight: Tensor, lookup: Lookup) -> None:
        """Bring the rows of prepared shares to what the table holds now, sending again no more than what was
        changed.

        A row that an update wrote while it was being read may be torn: it belongs to a change after the
        lookup's version, so it is read again.
        """
        now = weight._version
        if now == lookup.version:
            return
        start = time.perf_counter()
        changes = [change for change in list(self.changes or ()) if lookup.version < change[1] <= now]
        # Recorded changes must follow each other without a gap, from the lookup's version or before to now.
        befores, afters = [before for before, _, _ in changes], [after for _, after, _ in changes]
        known = bool(changes) and befores[0] <= lookup.version and [*befores[1:], now] == afters
        uniques = [share.where.unique_U for share in lookup.shares]
        places = (
            self._changed_places(changes, uniques, len(weight))
            if known
            else [torch.arange(len(ids_U)) for ids_U in uniques]
        )
        for share, places_C in zip(lookup.shares, places, strict=True):
            if len(places_C):
                ids_C = share.where.unique_U.index_select(0, places_C)
                share.channel.mend(share, places_C, partial(native.gather, weight.detach(), None, ids_C))
        lookup.version = now
        self._counters.repaired += sum(len(places_C) for places_C in places)
        self._counters.repair_ms += 1e3 * (time.perf_counter() - start)

    def _changed_places(
        self, changes: list[tuple[int, int, Tensor]], uniques: list[Tensor], num_rows: int
    ) -> list[Tensor]:
        """Return, for each tensor of unique ids, the places of those that were changed."""
        if self._mark is None or len(self._mark) != num_rows:  # takes memory where it is touched
            self._mark = zero_rows((num_rows,), torch.uint8)
        for _, _, changed in changes:
            self._mark.index_fill_(0, changed, 1)
        places = [self._mark.index_select(0, unique_U).nonzero().squeeze(1) for unique_U in uniques]
        for _, _, changed in changes:  # not all rows: a pass over a large table takes longer than the step
            self._mark.index_fill_(0, changed, 0)
        return places
