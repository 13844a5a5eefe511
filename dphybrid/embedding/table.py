"""A table in host memory whose rows, not whose whole, take part in training.

Letters: N ids of a lookup, U unique rows of it, B bags, D width of a row.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from dphybrid.embedding.lookup import Lookup, Rows, WeightedBags, sort_ids
from dphybrid.embedding.storage import fill_normal, finished_file, open_rows
from dphybrid.errors import UserError

_CACHED_VALUES = 2**17
"""Values of a table changed at a time, 512 KiB of float32."""

_REFRESH_WHOLE_SHARE = 0.3
"""From this share of changed rows on, reading all rows again is cheaper than mending single ones."""


class HostEmbedding(nn.Module):
    """An embedding table (num_rows, dim) that stays on the CPU whatever `.to()` or `.cuda()` does.

    The table is no parameter: neither autograd nor a torch optimizer sees it. A lookup gathers the unique rows as a small leaf, so
    gradients exist for the touched rows only; a row optimizer of `dphybrid.embedding` applies them in place.

    num_rows, dim: shape of the table. padding_idx: a row that stays zero and is never trained. std: of the normal start values.
    seed: start of those values. name: for messages. dtype: float32, float64, or bfloat16 (rows are looked up as float32 then, and
    updates are rounded stochastically). storage: "memory", or "mmap" with the file `path`, which outlives the process and, once
    there, is opened as it is. Raises UserError, with the numbers, when the table would not fit.
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
        with finished_file(path) if fresh and path is not None else nullcontext():
            if fresh:
                fill_normal(self.weight, std, seed)
            if fresh and padding_idx is not None:
                self.weight[padding_idx] = 0.0
        self.frozen_rows = torch.tensor([] if padding_idx is None else [padding_idx], dtype=torch.int64)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._prepared: list[Lookup] = []
        self._changes: deque[tuple[int, int, Tensor]] | None = None
        self._mark: Tensor | None = None
        self.num_ids = self.num_unique = self.num_prepared = self.num_refreshed = 0

    @property
    def row_dtype(self) -> torch.dtype:
        """Type of looked-up rows and of the optimizer's states: float32 for a bfloat16 table."""
        return torch.float32 if self.weight.dtype == torch.bfloat16 else self.weight.dtype

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

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids` (any shape, int64) as (*ids.shape, dim) on the CPU.

        With gradients enabled, remembers the looked-up rows until `clear_row_gradients`. Raises UserError for ids of another type or
        out of range, naming table, value and position.
        """
        lookup = self._lookup(ids)
        return Rows.apply(lookup.rows_UD, *lookup.sums).view(*ids.shape, self.dim)

    def bags(self, ids_N: Tensor, offsets_B: Tensor, *, mode: str = "sum", weights_N: Tensor | None = None) -> Tensor:
        """Return pooled_BD, the sum or mean of the rows of each bag; bag b is ids_N[offsets_B[b] : offsets_B[b + 1]], perhaps empty.

        weights_N: a factor for each id (mode "sum" only), gets a gradient when it wants one. Raises UserError like `forward`.
        """
        if mode not in ("sum", "mean") or (mode == "mean" and weights_N is not None):
            raise UserError(f"table {self.name!r}: mode={mode!r}; use sum (with or without weights_N) or mean (without)")
        lookup = self._lookup(ids_N)
        if mode == "mean":
            lengths_B = torch.diff(offsets_B, append=offsets_B.new_tensor([len(ids_N)]))
            weights_N = torch.repeat_interleave(1 / lengths_B.to(self.row_dtype), lengths_B)
        return WeightedBags.apply(lookup.rows_UD, weights_N, offsets_B, *lookup.sums)

    def _lookup(self, ids: Tensor) -> Lookup:
        lookup = self._take_prepared(ids) or self.prepare(ids)
        self.num_ids += lookup.ids.numel()
        self.num_unique += len(lookup.unique_U)
        if torch.is_grad_enabled():
            lookup.rows_UD.requires_grad_()
            self._pending.append((lookup.unique_U, lookup.rows_UD))
        return lookup

    def prepare(self, ids: Tensor) -> Lookup:
        """Check `ids`, find the unique ones and gather their rows. May run in another thread, beside updates: see `refresh`."""
        ids = self._checked(ids)
        version = self.weight._version
        unique_U, inverse_N, order_N, starts_U = sort_ids(ids.reshape(-1))
        return Lookup(ids, unique_U, inverse_N, order_N, starts_U, self.read_rows(unique_U), version)

    def expect(self, lookups: Sequence[Lookup]) -> None:
        """Use these prepared lookups for the next `forward` calls with equal ids, each once; earlier ones are forgotten."""
        self._prepared = list(lookups)

    def record_changes(self, updates: int) -> None:
        """Remember which rows the last `updates` updates changed (0: no longer), so that `refresh` can be selective."""
        self._changes = deque(maxlen=updates) if updates else None

    def refresh(self, lookup: Lookup) -> Lookup:
        """Bring the rows of a prepared lookup to what the table holds now, reading again no more than what was changed.

        A row that an update wrote while `prepare` was reading may be torn: it belongs to a change after the lookup's version, so it is
        read again. A change that is not on record (a loaded state dict, an edit by hand) makes all rows be read again.
        """
        now = self.weight._version
        if now == lookup.version:
            return lookup
        changes = [change for change in self._changes or () if change[1] > lookup.version]
        steps = [lookup.version, *(after for _, after, _ in changes)]
        known = [before for before, _, _ in changes] + [now] == steps
        places_C = self._places_of(changes, lookup.unique_U) if known else None
        if places_C is None or len(places_C) > _REFRESH_WHOLE_SHARE * len(lookup.unique_U):
            lookup.rows_UD = self.read_rows(lookup.unique_U)
        elif len(places_C):
            lookup.rows_UD.index_copy_(0, places_C, self.read_rows(lookup.unique_U.index_select(0, places_C)))
        lookup.version = now
        self.num_refreshed += len(lookup.unique_U) if places_C is None else len(places_C)
        return lookup

    def _places_of(self, changes: list[tuple[int, int, Tensor]], unique_U: Tensor) -> Tensor:
        if self._mark is None:
            self._mark = torch.zeros(self.num_rows, dtype=torch.uint8)
        for _, _, changed in changes:
            self._mark.index_fill_(0, changed, 1)
        places_C = self._mark.index_select(0, unique_U).nonzero().squeeze(1)
        for _, _, changed in changes:
            self._mark.index_fill_(0, changed, 0)
        return places_C

    def _take_prepared(self, ids: Tensor) -> Lookup | None:
        for place, lookup in enumerate(self._prepared):
            if ids.shape == lookup.ids.shape and ids.dtype == torch.int64 and torch.equal(ids.cpu(), lookup.ids):
                self.num_prepared += len(lookup.unique_U)
                return self.refresh(self._prepared.pop(place))
        return None

    def _checked(self, ids: Tensor) -> Tensor:
        if ids.dtype != torch.int64:
            raise UserError(
                f"table {self.name!r}: ids are {ids.dtype}; give int64 (a float holds no id above 16,777,216 exactly)"
            )
        ids = ids.cpu()
        if ids.numel():
            low, high = torch.aminmax(ids)
            if int(low) < 0 or int(high) >= self.num_rows:
                wrong = ((ids < 0) | (ids >= self.num_rows)).nonzero()[0].tolist()
                raise UserError(
                    f"table {self.name!r}: id {int(ids[tuple(wrong)])} at position {wrong} is no row; rows are 0 to {self.num_rows - 1}"
                )
        return ids

    def row_gradients(self) -> tuple[Tensor, Tensor] | None:
        """Return (ids_U sorted and unique, grads_UD) over all lookups since the last clearing, or None when no row has a gradient."""
        parts = [(ids_U, rows_UD.grad) for ids_U, rows_UD in self._pending if rows_UD.grad is not None]
        if not parts:
            return None
        if len(parts) == 1:
            ids_U, grads_UD = parts[0]
        else:
            ids_U, inverse = torch.unique(torch.cat([ids for ids, _ in parts]), return_inverse=True)
            grads_UD = torch.zeros(len(ids_U), self.dim, dtype=self.row_dtype)
            grads_UD.index_add_(0, inverse, torch.cat([grads for _, grads in parts]))
        if len(self.frozen_rows) and len(ids_U):
            places = torch.searchsorted(ids_U, self.frozen_rows).clamp_(max=len(ids_U) - 1)
            places = places[ids_U[places] == self.frozen_rows]
            if len(places):
                keep_U = torch.ones(len(ids_U), dtype=torch.bool).index_fill_(0, places, False)
                ids_U, grads_UD = ids_U[keep_U], grads_UD[keep_U]
        return ids_U, grads_UD

    def set_row_gradients(self, ids_U: Tensor, grads_UD: Tensor) -> None:
        """Put merged (and perhaps clipped) gradients in the place of those of single lookups."""
        rows_UD = torch.empty_like(grads_UD)
        rows_UD.grad = grads_UD
        self._pending = [(ids_U, rows_UD)]

    def clear_row_gradients(self) -> None:
        """Forget lookups and their gradients."""
        self._pending = []

    def read_rows(self, ids_U: Tensor) -> Tensor:
        """Return a copy of the rows ids_U in `row_dtype`."""
        return self.weight.index_select(0, ids_U).to(self.row_dtype)

    def update_rows(
        self, ids_U: Tensor, change: Callable[[Tensor, slice], None], generator: torch.Generator | None = None
    ) -> None:
        """Read the rows ids_U (unique), let `change(rows_CD, part)` change them in place, write them back; `part` says which of ids_U.

        Works on as many rows at a time as stay in a core's cache, about 1.4 times as fast as all at once. A bfloat16 table
        rounds up or down by chance, drawn from `generator`, so that updates far below a value's resolution arrive on average.
        """
        before = self.weight._version
        step = max(1, _CACHED_VALUES // self.dim)
        for start in range(0, len(ids_U), step):
            part = slice(start, start + step)
            rows_CD = self.read_rows(ids_U[part])
            change(rows_CD, part)
            self.weight.index_copy_(0, ids_U[part], self._rounded(rows_CD, generator))
        if self._changes is not None and len(ids_U):
            self._changes.append((before, self.weight._version, ids_U))

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
