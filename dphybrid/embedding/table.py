"""A table in host memory whose rows, not whose whole, take part in training.

Letters: N ids of a lookup, U unique rows of it, B bags, D width of a row.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import native
from dphybrid.embedding.ahead import LookupsAhead
from dphybrid.embedding.counters import Counters
from dphybrid.embedding.gradients import Pending, RowGradients, arrange_gradients
from dphybrid.embedding.lookup import all_in_range, no_row, whole_numbers
from dphybrid.embedding.native import fill_normal
from dphybrid.embedding.replicas import DeviceRows, SizesOf
from dphybrid.embedding.storage import StartValues, deferred_rows, finished_file, open_rows, open_states
from dphybrid.embedding.weight import TableWeight
from dphybrid.util.compiling import outside_of_graphs
from dphybrid.util.errors import UserError


class HostEmbedding(nn.Module):
    """An embedding table (num_rows, dim) that stays on the CPU whatever `.to()` or `.cuda()` does.

    The table is a buffer, no parameter: neither autograd nor a dense optimizer sees it. A lookup returns rows
    whose gradients are collected by unique row, so gradients exist for the touched rows only; a row optimizer
    of `dphybrid.embedding` applies them in place. What the model's parameters know of the table is `anchor`,
    a parameter of one zero: `requires_grad_(False)` of table or model freezes the table, `zero_grad()` of the
    model clears the rows' gradients.

    num_rows, dim: shape of the table (or num_embeddings, embedding_dim). padding_idx: a row that stays zero
    and is never trained; counts from the end when negative. std: of the normal start values.
    seed: start of those values. name: for messages. dtype: float32, float64, or bfloat16 (rows are looked up
    as float32 then, and updates are rounded stochastically). storage: "memory", or "mmap" with the file
    `path`, which outlives the process and, once there, is opened as it is; or with a folder as `path`, for a
    file that is gone with the process. freeze: is not trained.

    Raises UserError, with the numbers, when the table would not fit, and for what else nn.Embedding takes
    (max_norm, ...) and a table does not do.
    """

    over_ranks = False
    """Do all processes of a group share these rows, so that each one's gradients reach them? Where not, a row
    optimizer refuses to train one of several copies."""

    def __init__(
        self,
        num_rows: int | None = None,
        dim: int | None = None,
        *,
        padding_idx: int | None = None,
        std: float = 0.1,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        name: str = "table",
        storage: str = "memory",
        path: Path | None = None,
        freeze: bool = False,
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
        **foreign: Any,
    ) -> None:
        super().__init__()
        num_rows, dim = _one(num_rows, num_embeddings), _one(dim, embedding_dim)
        if num_rows is None or dim is None:
            raise UserError(
                f"table {name!r}: give num_rows (or num_embeddings) and dim (or embedding_dim), each once"
            )
        _refuse_foreign(foreign, name)
        if num_rows < 1 or dim < 1:
            raise UserError(f"table {name!r}: num_rows={num_rows}, dim={dim}; both must be at least 1")
        padding_idx = _row(padding_idx, num_rows, name)
        if dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise UserError(f"table {name!r}: dtype={dtype}; use float32, float64 or bfloat16")
        self.num_rows, self.dim, self.padding_idx, self.name = num_rows, dim, padding_idx, name
        rows_VD, fresh = open_rows(num_rows, dim, dtype, storage, path, name)
        self._fresh, self._path = fresh, path
        self.start = StartValues(std, seed)
        with finished_file(path) if fresh and path is not None and not path.is_dir() else nullcontext():
            if fresh:
                fill_normal(rows_VD, std, seed)
            self.rows_VD = rows_VD
            if padding_idx is not None:
                self.scale_start(padding_idx, padding_idx + 1, 0.0)
        self.counters = Counters()
        self._hold(rows_VD, [] if padding_idx is None else [padding_idx])
        self.requires_grad_(not freeze)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any
    ) -> Self:
        """Return a table of these rows (num_rows, dim), which it shares where they are contiguous on the CPU.

        freeze: as for nn.Embedding, it is not trained unless False. options: name. Raises UserError for
        another type or shape.
        """
        if embeddings.dim() != 2:
            raise UserError(f"from_pretrained: rows of shape {tuple(embeddings.shape)}; give (num_rows, dim)")
        with deferred_rows():
            table = cls(
                *embeddings.shape, padding_idx=padding_idx, dtype=embeddings.dtype, freeze=freeze, **options
            )
        table.weight = embeddings.detach().cpu().contiguous()
        table._fresh = True
        return table

    def _hold(self, rows_VD: Tensor, frozen: list[int]) -> None:
        self.anchor = nn.Parameter(torch.zeros(1, dtype=self._row_dtype_of(rows_VD)))
        self.gradients = RowGradients(self.name, self.num_rows, self.counters, self.anchor)
        self.gradients.frozen = frozen
        self.ahead = LookupsAhead(self.counters)
        self._placed: tuple[Sequence[torch.device], SizesOf] | None = None
        self.rows_VD = rows_VD
        self._buffers["weight"] = TableWeight.of(rows_VD, self.gradients, self)

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would put a tensor of a buffer's name among the buffers.
        if name == "weight":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle gets: rows and settings, not the gradients of the step in hand."""
        self.ahead.finish()
        state = self.__dict__.copy()
        for made in ("gradients", "ahead"):
            del state[made]
        state |= {"_buffers": {}, "_parameters": {}, "_path": None, "_fresh": True}
        return state | {"_kept": (self.gradients.frozen, self.gradients.trains, self.anchor.detach())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        frozen, trains, anchor = state.pop("_kept")
        placed = state["_placed"]
        super().__setstate__(state)
        self._hold(self.rows_VD, list(frozen))
        self.anchor.data = anchor
        self.requires_grad_(trains)
        if placed is not None:
            self.place_on(*placed)

    @property
    def num_embeddings(self) -> int:
        """As nn.Embedding calls `num_rows`."""
        return self.num_rows

    @property
    def embedding_dim(self) -> int:
        """As nn.Embedding calls `dim`."""
        return self.dim

    @property
    def weight(self) -> Tensor:
        """The rows (num_rows, dim), once an update of rows that the next batch does not need has ended; see
        `TableWeight`."""
        self.ahead.finish()
        weight: Tensor = self._buffers["weight"]  # type: ignore[assignment]
        return weight

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.ahead.finish()
        rows_VD = value.rows if isinstance(value, TableWeight) else value.detach()
        if rows_VD.shape != self.rows_VD.shape or rows_VD.dtype != self.rows_VD.dtype or rows_VD.is_cuda:
            raise UserError(
                f"table {self.name!r}: weight = {tuple(rows_VD.shape)} of {rows_VD.dtype} on "
                f"{rows_VD.device}; it is {tuple(self.rows_VD.shape)} of {self.rows_VD.dtype} on the CPU"
            )
        self.rows_VD = rows_VD
        self._buffers["weight"].hold(rows_VD)  # type: ignore[union-attr]

    def settled(self) -> Tensor:
        """The rows as a plain tensor, once all updates have ended."""
        self.ahead.finish()
        return self.rows_VD

    @property
    def row_dtype(self) -> torch.dtype:
        """Type of looked-up rows and of the optimizer's states: float32 for a bfloat16 table."""
        return self._row_dtype_of(self.rows_VD)

    @staticmethod
    def _row_dtype_of(rows_VD: Tensor) -> torch.dtype:
        return torch.float32 if rows_VD.dtype == torch.bfloat16 else rows_VD.dtype

    def scale_start(self, first: int, last: int, factor: float) -> None:
        """Multiply the start values of the rows first to below last; rows that were in a file stay."""
        self.start.scales.append((first, last, factor))
        if self._fresh and factor:
            self.rows_VD[first:last] *= factor
        elif self._fresh:
            self.rows_VD[first:last] = 0.0

    def zero_states(self, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """Return the states of a row optimizer, in memory or files like the table's own rows; see
        `storage.open_states`."""
        return open_states(wanted, self._path, fresh=self._fresh, name=self.name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Moving or casting the model leaves the table as it is; looked-up rows follow the anchor's type.
        buffers, self._buffers = self._buffers, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers = buffers
        self.gradients.move_to(self.anchor)
        return self

    def _replicate_for_data_parallel(self) -> Self:
        raise UserError(
            f"table {self.name!r} is inside a DataParallel block; look rows up outside and hand them to the "
            "block"
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.settled()

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
        if state_dict[key].shape != self.rows_VD.shape:
            error_msgs.append(
                f"{key}: shape {tuple(state_dict[key].shape)} in the file, {tuple(self.rows_VD.shape)} in "
                "the table"
            )
            return
        with torch.no_grad():
            self.settled().copy_(state_dict[key])

    @outside_of_graphs
    def forward(self, ids: Tensor, *, by_replica: bool = False) -> Tensor | list[Tensor]:
        """Return the rows of `ids` (any shape, int64 or int32) as (*ids.shape, dim) on the CPU.

        by_replica: see `replica_rows`. With gradients enabled and the table not frozen, the rows' gradients
        are collected until they are cleared. Raises UserError for ids of another type or out of range, naming
        table, value and position.
        """
        if by_replica and self.ahead.is_placed:
            return self._rows_by_replica(ids)
        start = time.perf_counter()
        ids = whole_numbers(ids, self.name)
        flat_N = ids.reshape(-1)
        rows = torch.empty((*ids.shape, self.dim), dtype=self.row_dtype)
        if not native.gather(self.settled(), flat_N, rows):
            raise no_row(ids, self.num_rows, self.name)
        if torch.is_grad_enabled():
            self.counters.gather_ms += 1e3 * (time.perf_counter() - start)
            self.counters.bytes_gathered += rows.nbytes
            rows = self._remembered(rows, Pending(flat_N))
        rows = self.as_model(rows)
        return [rows] if by_replica else rows

    def _remembered(self, rows: Tensor, pending: Pending) -> Tensor:
        self.counters.ids += len(pending.ids_N)
        return self.gradients.remember(rows, pending) if self.gradients.expect() else rows

    def as_model(self, rows: Tensor) -> Tensor:
        """Rows in the type that the model was cast to."""
        dtype = self.gradients.anchor.dtype
        return rows if rows.dtype == dtype else rows.to(dtype)

    @outside_of_graphs
    def bags(
        self, ids_N: Tensor, offsets_B: Tensor, *, mode: str = "sum", weights_N: Tensor | None = None
    ) -> Tensor:
        """Return pooled_BD, the sum, mean or maximum (mode "max") of the rows of each bag; bag b is
        ids_N[offsets_B[b] : offsets_B[b + 1]], perhaps empty: zeros.

        weights_N: a factor for each id (mode "sum" only), gets a gradient when it wants one. Raises UserError
        like `forward`.
        """
        if mode not in ("sum", "mean", "max") or (mode != "sum" and weights_N is not None):
            raise UserError(
                f"table {self.name!r}: mode={mode!r}{'' if weights_N is None else ' with weights_N'}; use "
                "sum (with or without weights_N), mean or max (without)"
            )
        ids_N = whole_numbers(ids_N, self.name).reshape(-1)
        if mode == "max":
            ids_N, offsets_B = self.without_padding(ids_N, offsets_B)
        offsets_B = native.check_offsets(offsets_B, len(ids_N))
        if weights_N is not None or mode == "max":
            rows_ND = self(ids_N)
            return F.embedding_bag(
                torch.arange(len(rows_ND)), rows_ND, offsets_B, mode=mode, per_sample_weights=weights_N
            )
        if not all_in_range(ids_N, self.num_rows):
            raise no_row(ids_N, self.num_rows, self.name)
        ends_B = (
            torch.cat([offsets_B[1:], offsets_B.new_tensor([len(ids_N)])]) if len(offsets_B) else offsets_B
        )
        pooled_BD = native.pool(self.settled(), ids_N, offsets_B)
        lengths_B = ends_B - offsets_B
        if torch.is_grad_enabled():
            bags_N = torch.repeat_interleave(torch.arange(len(offsets_B)), lengths_B)
            pooled_BD = self._remembered(pooled_BD, Pending(ids_N, bags_N))
        return pooled_BD / lengths_B.clamp(min=1).unsqueeze(1) if mode == "mean" else pooled_BD

    def without_padding(self, ids_N: Tensor, offsets_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same bags without padding ids, whose zeros would be the maximum of negative rows."""
        if not self.gradients.frozen:
            return ids_N, offsets_B
        kept_N = ~torch.isin(ids_N, torch.tensor(self.gradients.frozen))
        before = F.pad(kept_N.cumsum(0), (1, 0))
        return ids_N[kept_N], before[offsets_B]

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Say where `replica_rows` delivers. devices: one a replica. sizes_of(rows): the rows of each
        replica's share of a batch, in order.

        For a region: `table.place_on(region.devices.replicas, region.sizes)`.
        """
        self.ahead.place_on(devices, sizes_of)
        self._placed = (list(devices), sizes_of)

    @property
    def is_placed(self) -> bool:
        """Has `place_on` said where rows go?"""
        return self._placed is not None

    def replica_rows(self, ids: Tensor) -> list[Tensor]:
        """Return for each used replica the rows of its share of `ids` (B, ...) on its device, as (b, ...,
        dim).

        Only the unique rows of a share travel, straight to their device, and only their summed gradients come
        back. A region takes them as `parts(...)` of `dphybrid.parallel`. Before `place_on`: one share, on the
        CPU. Raises UserError like `forward`.
        """
        rows: list[Tensor] = self(ids, by_replica=True)
        return rows

    def _rows_by_replica(self, ids: Tensor) -> list[Tensor]:
        lookup = self.ahead.lookup_of(self, whole_numbers(ids, self.name))
        counted, trained = torch.is_grad_enabled(), self.gradients.expect()
        if counted:
            self.counters.ids += lookup.ids.numel()
            self.counters.unique += lookup.num_unique
            self.counters.dedup_ms += lookup.dedup_ms
        rows = []
        for channel, share in self.ahead.shares_of(lookup):
            channel.arrive(share, counted=counted)
            leaf_UD = share.rows_UD.detach()
            if trained:
                self.gradients.watch(leaf_UD, Pending(share.where.unique_U, channel=channel))
            rows_ND = DeviceRows.apply(leaf_UD, *share.indices)
            rows.append(self.as_model(rows_ND.view(*share.shape, self.dim)))
        return rows

    def totals(self) -> dict[str, float]:
        """Return the running totals by name, those of finished copies included; see `Counters`."""
        self.ahead.settle_times()
        return asdict(self.counters)

    def row_gradients(self) -> tuple[Tensor, Tensor] | None:
        """Return (ids_U sorted and unique, grads_UD) over all lookups since the last clearing, or None when
        no row has a gradient."""
        if not self.gradients:
            return None
        arranged, _ = arrange_gradients([self.gradients], self.row_dtype)
        if not len(arranged.keys_U):
            return None
        grads_UD, _ = native.sum_rows(arranged, self.dim, self.row_dtype)
        return arranged.keys_U, grads_UD.mul_(self.gradients.factor)

    def set_row_gradients(self, ids_U: Tensor, grads_UD: Tensor) -> None:
        """Put merged (and perhaps clipped) gradients in the place of those of single lookups."""
        self.gradients.replace(ids_U, grads_UD)

    def clear_row_gradients(self) -> None:
        """Forget the gradients of all lookups."""
        self.gradients.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all lookups, as `zero_grad()` of the model does."""
        self.gradients.clear()

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, dtype={self.rows_VD.dtype}, in host memory"


def dense_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a model, but for those that stand for its tables."""
    anchors = {id(module.anchor) for module in model.modules() if isinstance(module, HostEmbedding)}
    return (parameter for parameter in model.parameters() if id(parameter) not in anchors)


def _one(ours: int | None, theirs: int | None) -> int | None:
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return None


def _row(padding_idx: int | None, num_rows: int, name: str) -> int | None:
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise UserError(f"table {name!r}: padding_idx={padding_idx} is no row; use 0 to {num_rows - 1}")
    return padding_idx % num_rows


_FOREIGN = {
    "max_norm": (None, "rows are not scaled when they are looked up; use torch.renorm on looked-up rows"),
    "norm_type": (2.0, "it goes with max_norm, which a table does not do"),
    "scale_grad_by_freq": (False, "gradients of a row are summed; divide by torch.bincount in the loss"),
    "sparse": (True, "gradients exist for the looked-up rows only"),
    "device": (None, "a table stays in host memory; its rows go where replica_rows or .to() brings them"),
    "_weight": (None, "use HostEmbedding.from_pretrained(weight, freeze=False)"),
    "_freeze": (False, "use freeze=True"),
}
"""What nn.Embedding takes besides, the value that changes nothing, and why it is refused otherwise."""


def _refuse_foreign(options: Mapping[str, Any], name: str) -> None:
    for option, value in options.items():
        if option not in _FOREIGN:
            raise TypeError(f"HostEmbedding() got an unexpected keyword argument {option!r}")
        unused, why = _FOREIGN[option]
        if value != unused and not (option == "device" and torch.device(value).type == "cpu"):
            raise UserError(f"table {name!r}: {option}={value}: {why}")
