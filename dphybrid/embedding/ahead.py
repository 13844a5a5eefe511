"""A table's lookups for replicas: prepared ahead of their use, and repaired if an update has changed their
rows since.

Letters: N ids of one replica's share, U unique ids among them, C rows changed meanwhile, D width of a row, V
rows of the table.

Why a prepared lookup is exact: it holds the weight that it was made from, and serves no other one. Every
tensor of torch has a version that each in-place write raises. An update records the rows it changed, with the
weight's version before and after. A lookup stores the version that it read before it began to gather, so an
update that may have run during the gathering has a later version, and its rows are read again. After a change
without a record (a loaded state dict, an edit by hand) all rows are read again. Writes through `.data` or
numpy do not raise the version, so a prepared lookup does not see them.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dphybrid.embedding.lookup import Counters, row_numbers
from dphybrid.embedding.native import StoredRows
from dphybrid.embedding.replicas import Channel, Share, SizesOf
from dphybrid.embedding.storage import zero_rows
from dphybrid.embedding.weights import all_rows, info_of
from dphybrid.util.errors import UserError


@dataclass
class Lookup:
    """The ids that one batch looks up in one table (any shape), and each replica's rows as of `version` of
    `weight`. memory: the weight's, as of then; `weight.data = ...` gives it another."""

    weight: Tensor
    memory: Tensor | StoredRows
    ids: Tensor
    ids_of_shares: Sequence[Tensor]
    shares: list[Share]
    version: int

    def is_of(self, weight: Tensor, ids: Tensor, replica: int | None = None) -> bool:
        """Return whether the lookup was made from this weight, for these ids. replica: whose share these are;
        None: they are the whole batch's."""
        if replica is not None and replica >= len(self.shares):
            return False
        prepared = self.ids if replica is None else self.ids_of_shares[replica]
        # Ids by value, not by identity: a batch may have been copied or moved on its way to `forward`.
        now = all_rows(weight)
        return (
            self.weight is weight
            and self.memory.data_ptr() == now.data_ptr()
            and self.memory.shape == now.shape
            and ids.shape == prepared.shape
            and ids.dtype == torch.int64
            and torch.equal(ids.cpu(), prepared)
        )


class LookupsAhead:
    """Prepares, hands out and repairs a table's lookups for the replicas of a region.

    Methods take the weight as an argument. A reference to the table would be a cycle (the table holds this
    object), and only the garbage collector would free its memory.
    """

    def __init__(self, name: str, counters: Counters) -> None:
        self._name, self._counters = name, counters
        self._channels: list[Channel] = []
        self._sizes_of: SizesOf | None = None
        self._expected: list[Lookup] = []
        self._taken: set[tuple[int, int]] = set()
        self._lock = threading.Lock()  # replicas on several GPUs look up in threads
        self._changed_V: Tensor | None = None

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Set the replicas' devices and shares; see `HostEmbedding.place_on`."""
        if len(devices) == 1 and devices[0].type == "cpu":  # the rows are on this device already
            self._channels, self._sizes_of = [], None
            return
        self._channels = [Channel(device, self._counters) for device in devices]
        self._sizes_of = sizes_of

    @property
    def is_placed(self) -> bool:
        """Whether rows are sent to replicas."""
        return self._sizes_of is not None

    def prepare(self, weight: Tensor, ids: Tensor, threads: int | None = 1) -> Lookup | None:
        """Check `ids`, find the unique ids of each replica's share and start sending their rows. Return None
        if rows are not sent to replicas.

        May run in another thread while updates run; use `threads=1` there. Raises UserError for ids that are
        not rows of the table.
        """
        if self._sizes_of is None:  # the step reads the rows from the table itself
            return None
        ids = row_numbers(ids, len(weight), self._name)
        if not ids.dim():
            raise UserError(f"table {self._name!r}: one id, {int(ids)}, cannot be split; give ids (B, ...)")
        ids_of_shares = ids.split(list(self._sizes_of(len(ids))))
        # Read before any row is: a later update must look later, and all rows must be of one memory.
        version, memory = weight._version, all_rows(weight)
        shares = [
            channel.send(memory, ids_BX, threads)
            # a short batch has fewer shares than there are replicas
            for channel, ids_BX in zip(self._channels, ids_of_shares, strict=False)
        ]
        return Lookup(weight, memory, ids, ids_of_shares, shares, version)

    def expect(self, lookups: Sequence[Lookup]) -> None:
        """Use each of these prepared lookups once, for the next call with equal ids. Drops those set
        before."""
        self._expected, self._taken = list(lookups), set()

    def lookup_of(self, weight: Tensor, ids: Tensor) -> Lookup:
        """Return a lookup of `ids` with the table's present rows: a prepared one if there is one, else one
        made now."""
        for index, lookup in enumerate(self._expected):
            if lookup.is_of(weight, ids):
                self._counters.prepared += sum(len(share.where.unique_U) for share in lookup.shares)
                del self._expected[index]
                self.repair(lookup)
                return lookup
        made = self.prepare(weight, ids, threads=None)
        assert made is not None
        return made

    def share_of(self, weight: Tensor, ids: Tensor, replica: int) -> Share:
        """Return a replica's share of a lookup, with the table's present rows: a prepared one if there is
        one, else one made now. For a table inside a region. Raises UserError for ids that are not rows."""
        with self._lock:
            for lookup in self._expected:
                if (id(lookup), replica) not in self._taken and lookup.is_of(weight, ids, replica):
                    self._taken.add((id(lookup), replica))
                    self.repair(lookup)  # all shares, the first time
                    share = lookup.shares[replica]
                    self._counters.prepared += len(share.where.unique_U)
                    return share
        ids = row_numbers(ids, len(weight), self._name)
        return self._channels[replica].send(all_rows(weight), ids, None)

    def channel_to(self, device: torch.device) -> int:
        """Return the number of the channel to a device, which is made if there is none."""
        with self._lock:
            for number, channel in enumerate(self._channels):
                if channel.device == device:
                    return number
            self._channels.append(Channel(device, self._counters))
            return len(self._channels) - 1

    def repair(self, lookup: Lookup) -> None:
        """Update a prepared lookup to its weight's present rows. Sends only the changed rows again, if all
        changes since are recorded.

        A row that was read while an update wrote it may be torn (half old, half new). That update has a
        later version than the lookup, so the row is read again.
        """
        weight, now = lookup.weight, lookup.weight._version
        if now == lookup.version:
            return
        info = info_of(weight)
        recorded = [] if info is None or info.changes is None else list(info.changes)
        changes = [change for change in recorded if lookup.version < change[1] <= now]
        # Recorded changes must follow each other without a gap, from the lookup's version (or earlier) to
        # now. A gap is a write that is not in the record: then any row may have changed.
        befores, afters = [before for before, _, _ in changes], [after for _, after, _ in changes]
        is_recorded = bool(changes) and befores[0] <= lookup.version and [*befores[1:], now] == afters
        uniques = [share.where.unique_U for share in lookup.shares]
        positions = [torch.arange(len(ids_U), device="cpu") for ids_U in uniques]
        if is_recorded:
            # One byte for each row of the table, but only pages that are written take memory.
            if self._changed_V is None or len(self._changed_V) != len(weight):
                self._changed_V = zero_rows((len(weight),), torch.uint8)
            for _, _, changed in changes:
                self._changed_V.index_fill_(0, changed, 1)
            positions = [self._changed_V.index_select(0, ids_U).nonzero().squeeze(1) for ids_U in uniques]
            for _, _, changed in changes:  # not zero_(): a pass over a large table takes longer than the step
                self._changed_V.index_fill_(0, changed, 0)
        for share, positions_C in zip(lookup.shares, positions, strict=True):
            if len(positions_C):
                share.channel.send_again(share, positions_C, all_rows(weight))
        lookup.version = now
        self._counters.repaired += sum(len(positions_C) for positions_C in positions)
