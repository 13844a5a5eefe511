"""A table in host memory whose rows, not whose whole, take part in training.

Letters: N ids of a lookup, U unique rows of it, B bags, D width of a row.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import kernels
from dphybrid.embedding.ahead import LookupsAhead
from dphybrid.embedding.counters import Counters
from dphybrid.embedding.gradients import Pending, RowGradients, TableRows, arrange_gradients
from dphybrid.embedding.kernels import fill_normal
from dphybrid.embedding.lookup import all_in_range, no_row, whole_numbers
from dphybrid.embedding.replicas import DeviceRows, SizesOf
from dphybrid.embedding.storage import StartValues, finished_file, open_rows, open_states
from dphybrid.util.compiling import outside_of_graphs
from dphybrid.util.errors import UserError


class HostEmbedding(nn.Module):
    """An embedding table (num_rows, dim) that stays on the CPU whatever `.to()` or `.cuda()` does.

    The table is no parameter: neither autograd nor a torch optimizer sees it. A lookup returns rows whose
    gradients are collected by unique row, so gradients exist for the touched rows only; a row optimizer of
    `dphybrid.embedding` applies them in place.

    num_rows, dim: shape of the table. padding_idx: a row that stays zero and is never trained. std: of the
    normal start values.
    seed: start of those values. name: for messages. dtype: float32, float64, or bfloat16 (rows are looked up
    as float32 then, and updates are rounded stochastically). storage: "memory", or "mmap" with the file
    `path`, which outlives the process and, once there, is opened as it is; or with a folder as `path`, for a
    file that is gone with the process. Raises UserError, with the numbers, when the table would not fit.
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
        self.counters = Counters()
        self.ahead = LookupsAhead(self.counters)
        self.weight, fresh = open_rows(num_rows, dim, dtype, storage, path, name)
        self._fresh, self._path = fresh, path
        self.start = StartValues(std, seed)
        with finished_file(path) if fresh and path is not None and not path.is_dir() else nullcontext():
            if fresh:
                fill_normal(self.weight, std, seed)
            if padding_idx is not None:
                self.scale_start(padding_idx, padding_idx + 1, 0.0)
        self.gradients = RowGradients(name, num_rows, self.counters)
        self.gradients.frozen = [] if padding_idx is None else [padding_idx]
        self._anchor = torch.zeros(0, requires_grad=True)

    @property
    def weight(self) -> Tensor:
        """The rows (num_rows, dim), once an update of rows that the next batch does not need has ended. In a
        loop over a pipeline take it anew after a step, as one taken before may be written to."""
        self.ahead.finish()
        return self.rows_VD

    @weight.setter
    def weight(self, rows_VD: Tensor) -> None:
        self.rows_VD = rows_VD

    @property
    def row_dtype(self) -> torch.dtype:
        """Type of looked-up rows and of the optimizer's states: float32 for a bfloat16 table."""
        return torch.float32 if self.rows_VD.dtype == torch.bfloat16 else self.rows_VD.dtype

    def scale_start(self, first: int, last: int, factor: float) -> None:
        """Multiply the start values of the rows first to below last; rows that were in a file stay."""
        self.start.scales.append((first, last, factor))
        if self._fresh and factor:
            self.weight[first:last] *= factor
        elif self._fresh:
            self.weight[first:last] = 0.0

    def zero_states(self, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """Return the states of a row optimizer, in memory or files like the table's own rows; see
        `storage.open_states`."""
        return open_states(wanted, self._path, fresh=self._fresh, name=self.name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        return self  # moving or casting the model leaves the table where and as it is

    def _replicate_for_data_parallel(self) -> Self:
        raise UserError(
            f"table {self.name!r} is inside a DataParallel block; look rows up outside and hand them to the "
            "block"
        )

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
            error_msgs.append(
                f"{key}: shape {tuple(state_dict[key].shape)} in the file, {tuple(self.weight.shape)} in "
                "the table"
            )
            return
        self.weight.copy_(state_dict[key])

    @outside_of_graphs
    def forward(self, ids: Tensor, *, by_replica: bool = False) -> Tensor | list[Tensor]:
        """Return the rows of `ids` (any shape, int64) as (*ids.shape, dim) on the CPU. by_replica: see
        `replica_rows`.

        With gradients enabled, remembers the lookup until `clear_row_gradients`. Raises UserError for ids of
        another type or out of range, naming table, value and position.
        """
        if by_replica and self.ahead.is_placed:
            return self._rows_by_replica(ids)
        start = time.perf_counter()
        ids = whole_numbers(ids, self.name)
        flat_N = ids.reshape(-1)
        rows = torch.empty((*ids.shape, self.dim), dtype=self.row_dtype)
        if not kernels.gather(self.weight, flat_N, rows):
            raise no_row(ids, self.num_rows, self.name)
        if torch.is_grad_enabled():
            self.counters.gather_ms += 1e3 * (time.perf_counter() - start)
            self.counters.bytes_gathered += rows.nbytes
            rows = self._remembered(rows, Pending(flat_N))
        return [rows] if by_replica else rows

    def _remembered(self, rows: Tensor, pending: Pending) -> Tensor:
        self.counters.ids += len(pending.ids_N)
        self.gradients.expect(pending)
        linked: Tensor = TableRows.apply(self._anchor, rows, pending)
        return linked

    @outside_of_graphs
    def bags(
        self, ids_N: Tensor, offsets_B: Tensor, *, mode: str = "sum", weights_N: Tensor | None = None
    ) -> Tensor:
        """Return pooled_BD, the sum or mean of the rows of each bag; bag b is ids_N[offsets_B[b] :
        offsets_B[b + 1]], perhaps empty.

        weights_N: a factor for each id (mode "sum" only), gets a gradient when it wants one. Raises UserError
        like `forward`.
        """
        if mode not in ("sum", "mean") or (mode == "mean" and weights_N is not None):
            raise UserError(
                f"table {self.name!r}: mode={mode!r}; use sum (with or without weights_N) or mean (without)"
            )
        if weights_N is not None:
            rows_ND = self(ids_N.reshape(-1))
            return F.embedding_bag(
                torch.arange(len(rows_ND)), rows_ND, offsets_B, mode="sum", per_sample_weights=weights_N
            )
        ids_N = whole_numbers(ids_N, self.name).reshape(-1)
        if not all_in_range(ids_N, self.num_rows):
            raise no_row(ids_N, self.num_rows, self.name)
        ends_B = (
            torch.cat([offsets_B[1:], offsets_B.new_tensor([len(ids_N)])]) if len(offsets_B) else offsets_B
        )
        pooled_BD = kernels.pool(self.weight, ids_N, ends_B)
        lengths_B = ends_B - offsets_B
        if torch.is_grad_enabled():
            bags_N = torch.repeat_interleave(torch.arange(len(offsets_B)), lengths_B)
            pooled_BD = self._remembered(pooled_BD, Pending(ids_N, bags_N))
        return pooled_BD / lengths_B.clamp(min=1).unsqueeze(1) if mode == "mean" else pooled_BD

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Say where `replica_rows` delivers. devices: one a replica. sizes_of(rows): the rows of each
        replica's share of a batch, in order.

        For a region: `table.place_on(region.devices.replicas, region.sizes)`.
        """
        self.ahead.place_on(devices, sizes_of)

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
        lookup = self.ahead.lookup_of(self, ids)
        counted = torch.is_grad_enabled()
        if counted:
            self.counters.ids += lookup.ids.numel()
            self.counters.unique += lookup.num_unique
            self.counters.dedup_ms += lookup.dedup_ms
        rows = []
        for channel, share in self.ahead.shares_of(lookup):
            channel.arrive(share, counted=counted)
            leaf_UD = share.rows_UD.detach()
            if counted:
                leaf_UD.requires_grad_()
                self.gradients.expect(Pending(share.where.unique_U, leaf_UD=leaf_UD, channel=channel))
            rows_ND = DeviceRows.apply(leaf_UD, share.inverse_N, share.order_N, share.starts_U)
            rows.append(rows_ND.view(*share.shape, self.dim))
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
        grads_UD, _ = kernels.sum_rows(arranged, self.dim, self.row_dtype)
        return arranged.keys_U, grads_UD.mul_(self.gradients.factor)

    def set_row_gradients(self, ids_U: Tensor, grads_UD: Tensor) -> None:
        """Put merged (and perhaps clipped) gradients in the place of those of single lookups."""
        self.gradients.replace(ids_U, grads_UD)

    def clear_row_gradients(self) -> None:
        """Forget lookups and their gradients."""
        self.gradients.clear()

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, dtype={self.weight.dtype}, in host memory"
