"""A table in host memory whose rows, not whose whole, take part in training.

Letters: U unique rows of a lookup, D width of a row.
"""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.errors import UserError

_INIT_BLOCK_ROWS = 65536
"""Rows drawn from one generator: the bits do not depend on how many threads or calls fill a table."""


class HostEmbedding(nn.Module):
    """An embedding table (num_rows, dim) that stays on the CPU whatever `.to()` or `.cuda()` does.

    The table is no parameter: neither autograd nor a torch optimizer sees it. A lookup gathers the unique rows as a small leaf, so
    gradients exist for the touched rows only; a row optimizer of `dphybrid.embedding` applies them in place.

    num_rows, dim: shape of the table. padding_idx: a row that stays zero and is never trained. std: of the normal start values.
    seed: start of those values. name: for messages.
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
    ) -> None:
        super().__init__()
        if num_rows < 1 or dim < 1:
            raise UserError(f"table {name!r}: num_rows={num_rows}, dim={dim}; both must be at least 1")
        if padding_idx is not None and not 0 <= padding_idx < num_rows:
            raise UserError(f"table {name!r}: padding_idx={padding_idx} is no row; use 0 to {num_rows - 1}")
        self.num_rows, self.dim, self.padding_idx, self.name = num_rows, dim, padding_idx, name
        self.weight = torch.empty(num_rows, dim, dtype=dtype)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._fill(std, seed)

    def _fill(self, std: float, seed: int) -> None:
        for block, start in enumerate(range(0, self.num_rows, _INIT_BLOCK_ROWS)):
            generator = torch.Generator().manual_seed((seed * 1_000_003 + block) % 2**63)
            self.weight[start : start + _INIT_BLOCK_ROWS].normal_(0.0, std, generator=generator)
        if self.padding_idx is not None:
            self.weight[self.padding_idx] = 0.0

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
        ids = self._checked(ids)
        unique_U, inverse = torch.unique(ids, return_inverse=True)
        rows_UD = torch.index_select(self.weight, 0, unique_U)
        if torch.is_grad_enabled():
            rows_UD.requires_grad_()
            self._pending.append((unique_U, rows_UD))
        return F.embedding(inverse, rows_UD)

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
            all_ids = torch.cat([ids for ids, _ in parts])
            ids_U, inverse = torch.unique(all_ids, return_inverse=True)
            grads_UD = torch.zeros(len(ids_U), self.dim, dtype=self.weight.dtype)
            grads_UD.index_add_(0, inverse, torch.cat([grads for _, grads in parts]))
        if self.padding_idx is not None and len(ids_U):
            keep_U = ids_U != self.padding_idx
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

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, dtype={self.weight.dtype}, in host memory"


def find_tables(model: nn.Module) -> dict[str, HostEmbedding]:
    """Return the host tables of a model by dotted name, each once."""
    return dict(_tables(model))


def _tables(model: nn.Module) -> Iterator[tuple[str, HostEmbedding]]:
    for name, module in model.named_modules():
        if isinstance(module, HostEmbedding):
            yield name, module
