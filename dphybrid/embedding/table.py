"""A table in host memory whose rows, not whose whole, take part in training.

Letters: N ids of a lookup, U unique rows of it, B bags, D width of a row.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from dphybrid.embedding.counters import Counters
from dphybrid.embedding.gradients import RowGradients
from dphybrid.embedding.lookup import (
    Occurrences,
    RowSums,
    TableBags,
    TableRows,
    all_in_range,
    gather_rows,
    leaf_rows,
    short,
    sort_ids,
    write_rows,
)
from dphybrid.embedding.replicas import Channel, DeviceRows, Share, SizesOf
from dphybrid.embedding.storage import check_fits, fill_normal, finished_file, map_file, open_rows, zero_file, zero_rows
from dphybrid.util.compiling import outside_of_graphs
from dphybrid.util.errors import UserError

_CHUNK_VALUES = 2**18
"""Values of a table changed at a time, 1 MiB of float32: smaller chunks cost calls, larger ones leave a core's cache."""


@dataclass
class Lookup:
    """One batch's ids of one table, with everything that can be worked out before the step.

    ids: as given, any shape. where: their unique ids (None when they are for replicas). shares: for replicas, each one's rows, as they were at
    `version` of the table.
    """

    ids: Tensor
    where: Occurrences | None
    shares: list[Share]
    version: int
    dedup_ms: float

    @property
    def num_unique(self) -> int:
        """Unique ids, counted by replica."""
        return (
            self.where.unique_U.numel() if self.where is not None else sum(share.where.unique_U.numel() for share in self.shares)
        )


class HostEmbedding(nn.Module):
    """An embedding table (num_rows, dim) that stays on the CPU whatever `.to()` or `.cuda()` does.

    The table is no parameter: neither autograd nor a torch optimizer sees it. A lookup returns rows whose gradients are collected by unique
    row, so gradients exist for the touched rows only; a row optimizer of `dphybrid.embedding` applies them in place.

    num_rows, dim: shape of the table. padding_idx: a row that stays zero and is never trained. std: of the normal start values.
    seed: start of those values. name: for messages. dtype: float32, float64, or bfloat16 (rows are looked up as float32 then, and
    updates are rounded stochastically). storage: "memory", or "mmap" with the file `path`, which outlives the process and, once
    there, is opened as it is; or with a folder as `path`, for a file that is gone with the process.
    Raises UserError, with the numbers, when the table would not fit.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        padding_idx: int | None = None,
        std: float = 0.1,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        name: str = "table",
        storage: str = "memory",
        path: Path | None = None,
    ) -> None:
        super().__init__()
        if num_rows < 1 or dim < 1:
            raise UserError(f"table {name!r}: num_rows={num_rows}, dim={dim}; both must be at least 1")
        if padding_idx is not None and not 0 <= padding_idx < num_rows:
            raise UserError(f"table {name!r}: padding_idx={padding_idx} is no row; use 0 to {num_rows - 1}")
        if dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise UserError(f"table {name!r}: dtype={dtype}; use float32, float64 or bfloat16")
        self.num_rows, self.dim, self.padding_idx, self.name = num_rows, dim, padding_idx, name
        self.weight, fresh = open_rows(num_rows, dim, dtype, storage, path, name)
        self._fresh, self._path = fresh, path
        with finished_file(path) if fresh and path is not None and not path.is_dir() else nullcontext():
            if fresh:
                fill_normal(self.weight, std, seed)
            if fresh and padding_idx is not None:
                self.weight[padding_idx] = 0.0
        self.counters = Counters()
        self.gradients = RowGradients(num_rows, self.counters)
        if padding_idx is not None:
            self.gradients.frozen = torch.tensor([padding_idx])
        self._anchor = torch.zeros(0, requires_grad=True)
        self._prepared: list[Lookup] = []
        self._changes: deque[tuple[int, int, Tensor]] | None = None
        self._mark: Tensor | None = None
        self._channels: list[Channel] = []
        self._sizes_of: SizesOf | None = None

    @property
    def row_dtype(self) -> torch.dtype:
        """Type of looked-up rows and of the optimizer's states: float32 for a bfloat16 table."""
        return torch.float32 if self.weight.dtype == torch.bfloat16 else self.weight.dtype

    def zero_states(self, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """Return the states of a row optimizer by name, given their shapes and types, in memory or files like the table's own rows.

        They are zeros, or what was in the files `PATH.STATE` beside a table file that was opened as it is. Raises UserError, with the numbers,
        when they would not fit or a file is another optimizer's.
        """
        folder = self._path if self._path is None or self._path.is_dir() else self._path.parent
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in wanted.items()}
        files = (
            {name: self._path.with_name(f"{self._path.name}.{name}") for name in wanted}
            if self._path not in (None, folder)
            else {}
        )
        if self._fresh:
            for file in files.values():
                file.unlink(missing_ok=True)
        missing = [name for name in wanted if name not in files or not files[name].exists()]
        check_fits(sum(sizes[name] for name in missing), f"table {self.name!r}: the optimizer's states of its rows are", folder)
        states = {}
        for name, (shape, dtype) in wanted.items():
            if files:
                if name not in missing and files[name].stat().st_size != sizes[name]:
                    raise UserError(
                        f"table {self.name!r}: {files[name]} has another size than state {name}; was the optimizer another one?"
                    )
                states[name] = map_file(files[name], shape, dtype)
            else:
                states[name] = zero_rows(shape, dtype) if folder is None else zero_file(folder, shape, dtype)
        return states

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        return self  # moving or casting the model leaves the table where and as it is

    def _replicate_for_data_parallel(self) -> Self:
        raise UserError(f"table {self.name!r} is inside a DataParallel block; look rows up outside and hand them to the block")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            return
        if state_dict[key].shape != self.weight.shape:
            error_msgs.append(f"{key}: shape {tuple(state_dict[key].shape)} in the file, {tuple(self.weight.shape)} in the table")
            return
        self.weight.copy_(state_dict[key])

    @outside_of_graphs
    def forward(self, ids: Tensor, *, by_replica: bool = False) -> Tensor | list[Tensor]:
        """Return the rows of `ids` (any shape, int64) as (*ids.shape, dim) on the CPU. by_replica: see `replica_rows`.

        With gradients enabled, remembers the lookup until `clear_row_gradients`. Raises UserError for ids of another type or
        out of range, naming table, value and position.
        """
        if by_replica and self._sizes_of is not None:
            return self._rows_by_replica(ids, self._sizes_of)
        where, ids = self._look_up(ids)
        start = time.perf_counter()
        sums, anchor = RowSums(where), None
        if torch.is_grad_enabled():
            anchor = self._anchor
            self.gradients.expect_sums(sums)
        rows: Tensor = TableRows.apply(anchor, self.weight, ids, sums)
        if torch.is_grad_enabled():
            self.counters.gather_ms += 1e3 * (time.perf_counter() - start)
            self.counters.bytes_gathered += rows.nbytes
        return [rows] if by_replica else rows

    @outside_of_graphs
    def bags(self, ids_N: Tensor, offsets_B: Tensor, *, mode: str = "sum", weights_N: Tensor | None = None) -> Tensor:
        """Return pooled_BD, the sum or mean of the rows of each bag; bag b is ids_N[offsets_B[b] : offsets_B[b + 1]], perhaps empty.

        weights_N: a factor for each id (mode "sum" only), gets a gradient when it wants one. Raises UserError like `forward`.
        """
        if mode not in ("sum", "mean") or (mode == "mean" and weights_N is not None):
            raise UserError(f"table {self.name!r}: mode={mode!r}; use sum (with or without weights_N) or mean (without)")
        where, ids_N = self._look_up(ids_N)
        ids_N = short(ids_N.reshape(-1), self.num_rows)
        if mode == "mean":
            lengths_B = torch.diff(offsets_B, append=offsets_B.new_tensor([ids_N.numel()]))
            weights_N = torch.repeat_interleave(1 / lengths_B.to(self.row_dtype), lengths_B)
        leaf_UD = None
        if torch.is_grad_enabled():
            leaf_UD = leaf_rows(where.unique_U.numel(), self.dim, self.row_dtype)
            self.gradients.expect_leaf(where.unique_U, leaf_UD)
        return TableBags.apply(leaf_UD, weights_N, self.weight, ids_N, offsets_B, where)

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Say where `replica_rows` delivers. devices: one a replica. sizes_of(rows): the rows of each replica's share of a batch, in order.

        For a region: `table.place_on(region.devices.replicas, region.sizes)`.
        """
        if len(devices) == 1 and devices[0].type == "cpu":  # rows are there already
            self._channels, self._sizes_of = [], None
            return
        self._channels = [Channel(device, self.counters) for device in devices]
        self._sizes_of = sizes_of

    def replica_rows(self, ids: Tensor) -> list[Tensor]:
        """Return for each used replica the rows of its share of `ids` (B, ...) on its device, as (b, ..., dim).

        Only the unique rows of a share travel, straight to their device, and only their summed gradients come back. A region takes
        them as `parts(...)` of `dphybrid.parallel`. Before `place_on`: one share, on the CPU. Raises UserError like `forward`.
        """
        rows: list[Tensor] = self(ids, by_replica=True)
        return rows

    def _rows_by_replica(self, ids: Tensor, sizes_of: SizesOf) -> list[Tensor]:
        lookup = self._take_prepared(ids, placed=True) or self._prepare_shares(self._checked(ids), sizes_of)
        self.repair(lookup)
        self._count(lookup)
        rows = []
        for channel, share in zip(self._channels, lookup.shares, strict=False):
            channel.arrive(share, counted=torch.is_grad_enabled())
            leaf_UD = share.rows_UD.detach()
            if torch.is_grad_enabled():
                leaf_UD.requires_grad_()
                self.gradients.expect_leaf(share.where.unique_U, leaf_UD, channel)
            rows_ND = DeviceRows.apply(leaf_UD, share.inverse_N, share.order_N, share.starts_U)
            rows.append(rows_ND.view(*share.shape, self.dim))
        return rows

    def _look_up(self, ids: Tensor) -> tuple[Occurrences, Tensor]:
        lookup = self._take_prepared(ids, placed=False) or self._prepare_here(self._checked(ids))
        assert lookup.where is not None
        self._count(lookup)
        return lookup.where, lookup.ids

    def _count(self, lookup: Lookup) -> None:
        if not torch.is_grad_enabled():
            return
        self.counters.ids += lookup.ids.numel()
        self.counters.unique += lookup.num_unique
        self.counters.dedup_ms += lookup.dedup_ms

    def prepare(self, ids: Tensor) -> Lookup:
        """Check `ids`, find the unique ones and, for replicas, send their rows on the way. May run in another thread, beside updates."""
        ids = self._checked(ids)
        return self._prepare_here(ids) if self._sizes_of is None else self._prepare_shares(ids, self._sizes_of)

    def _prepare_here(self, ids: Tensor) -> Lookup:
        start = time.perf_counter()
        where = sort_ids(short(ids.reshape(-1), self.num_rows))
        # Rows are read from the table itself when they are used: copying them ahead would only cost time on the CPU.
        return Lookup(ids, where, [], self.weight._version, 1e3 * (time.perf_counter() - start))

    def _prepare_shares(self, ids: Tensor, sizes_of: SizesOf) -> Lookup:
        version = self.weight._version  # before any row is read
        like = torch.empty(0, self.dim, dtype=self.row_dtype)
        shares, dedup_s = [], 0.0
        for channel, ids_BX in zip(self._channels, ids.split(list(sizes_of(len(ids)))), strict=False):
            start = time.perf_counter()
            where = sort_ids(short(ids_BX.reshape(-1), self.num_rows))
            dedup_s += time.perf_counter() - start
            shares.append(channel.send(where, ids_BX.shape, self._read_into, like))
        return Lookup(ids, None, shares, version, 1e3 * dedup_s)

    def totals(self) -> dict[str, float]:
        """Return the running totals by name, those of finished copies included; see `Counters`."""
        for channel in self._channels:
            channel.settle_times()
        return asdict(self.counters)

    def expect(self, lookups: Sequence[Lookup]) -> None:
        """Use these prepared lookups for the next calls with equal ids, each once; earlier ones are forgotten."""
        self._prepared = list(lookups)

    def record_changes(self, updates: int) -> None:
        """Remember which rows the last `updates` updates changed (0: no longer), so that `repair` can be selective."""
        self._changes = deque(maxlen=updates) if updates else None

    def repair(self, lookup: Lookup) -> None:
        """Bring the rows of prepared shares to what the table holds now, sending again no more than what was changed.

        A row that an update wrote while it was being read may be torn: it belongs to a change after the lookup's version, so it is
        read again. A change that is not on record (a loaded state dict, an edit by hand) makes all rows be read again.
        """
        now = self.weight._version
        if now == lookup.version or not lookup.shares:
            return
        start = time.perf_counter()
        changes = [change for change in self._changes or () if change[1] > lookup.version]
        # Recorded changes must follow each other without a gap from at or before the lookup's version until now.
        befores, afters = [before for before, _, _ in changes], [after for _, after, _ in changes]
        known = bool(changes) and befores[0] <= lookup.version and [*befores[1:], now] == afters
        uniques = [share.where.unique_U for share in lookup.shares]
        places = self._changed_places(changes, uniques) if known else [torch.arange(ids_U.numel()) for ids_U in uniques]
        for channel, share, ids_U, places_C in zip(self._channels, lookup.shares, uniques, places, strict=False):
            if places_C.numel():
                channel.mend(share, places_C, self.read_rows(ids_U.index_select(0, places_C)))
        lookup.version = now
        self.counters.repaired += sum(places_C.numel() for places_C in places)
        self.counters.repair_ms += 1e3 * (time.perf_counter() - start)

    def _changed_places(self, changes: list[tuple[int, int, Tensor]], uniques: list[Tensor]) -> list[Tensor]:
        """Return, for each tensor of unique ids, the places of those that were changed."""
        if self._mark is None:  # a byte a row; takes memory where it is touched
            self._mark = zero_rows((self.num_rows,), torch.uint8)
        for _, _, changed in changes:
            self._mark.index_fill_(0, changed, 1)
        places = [self._mark.index_select(0, unique_U).nonzero().squeeze(1) for unique_U in uniques]
        for _, _, changed in changes:
            self._mark.index_fill_(0, changed, 0)
        return places

    def _take_prepared(self, ids: Tensor, *, placed: bool) -> Lookup | None:
        for place, lookup in enumerate(self._prepared):
            fits = ids.shape == lookup.ids.shape and ids.dtype == torch.int64 and (lookup.where is None) == placed
            if fits and torch.equal(ids.cpu(), lookup.ids):
                self.counters.prepared += lookup.num_unique
                return self._prepared.pop(place)
        return None

    def _checked(self, ids: Tensor) -> Tensor:
        if ids.dtype != torch.int64:
            raise UserError(
                f"table {self.name!r}: ids are {ids.dtype}; give int64 (a float holds no id above 16,777,216 exactly)"
            )
        ids = ids.cpu()
        if ids.numel() and not all_in_range(ids, self.num_rows):
            wrong = ((ids < 0) | (ids >= self.num_rows)).nonzero()[0].tolist()
            raise UserError(
                f"table {self.name!r}: id {int(ids[tuple(wrong)])} at position {wrong} is no row; rows are 0 to {self.num_rows - 1}"
            )
        return ids

    def row_gradients(self) -> tuple[Tensor, Tensor] | None:
        """Return (ids_U sorted and unique, grads_UD) over all lookups since the last clearing, or None when no row has a gradient."""
        return self.gradients.merged()

    def set_row_gradients(self, ids_U: Tensor, grads_UD: Tensor) -> None:
        """Put merged (and perhaps clipped) gradients in the place of those of single lookups."""
        self.gradients.replace(ids_U, grads_UD)

    def clear_row_gradients(self) -> None:
        """Forget lookups and their gradients."""
        self.gradients.clear()

    def read_rows(self, ids_U: Tensor) -> Tensor:
        """Return a copy of the rows ids_U in `row_dtype`."""
        return gather_rows(self.weight, ids_U).to(self.row_dtype)

    def _read_into(self, ids_U: Tensor, out_UD: Tensor) -> None:
        if self.weight.dtype == out_UD.dtype:
            torch.index_select(self.weight, 0, ids_U, out=out_UD)
        else:
            out_UD.copy_(self.weight.index_select(0, ids_U))

    def update_rows(self, change: Callable[[Tensor, Tensor, Tensor], None], generator: torch.Generator | None = None) -> None:
        """Let `change(rows_CD, grads_CD, ids_C)` change the rows that have gradients in place, some at a time, each once.

        A bfloat16 table rounds up or down by chance, drawn from `generator`, so that updates far below a value's resolution arrive on average.
        """
        start, before, changed = time.perf_counter(), self.weight._version, []
        waited_ms = self.counters.d2h_ms
        for ids_C, grads_CD in self.gradients.parts(max(1, _CHUNK_VALUES // self.dim)):
            rows_CD = self.read_rows(ids_C)
            change(rows_CD, grads_CD, ids_C)
            write_rows(self.weight, ids_C, self._rounded(rows_CD, generator))
            changed.append(ids_C)
        if self._changes is not None and changed:
            self._changes.append((before, self.weight._version, torch.cat(changed)))
        self.counters.update_ms += 1e3 * (time.perf_counter() - start) - (self.counters.d2h_ms - waited_ms)

    def _rounded(self, rows_CD: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.weight.dtype != torch.bfloat16:
            return rows_CD
        noise_CD = torch.randint(0, 2**16, rows_CD.shape, dtype=torch.int32, generator=generator)
        return (rows_CD.view(torch.int32) + noise_CD).bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, dtype={self.weight.dtype}, in host memory"


def find_tables(model: nn.Module) -> dict[str, HostEmbedding]:
    """Return the host tables of a model by dotted name, each once."""
    return dict(_tables(model))


def _tables(model: nn.Module) -> Iterator[tuple[str, HostEmbedding]]:
    for name, module in model.named_modules():
        if isinstance(module, HostEmbedding):
            yield name, module
