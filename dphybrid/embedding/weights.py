"""What is known of a table's weight beside its values: its name, and which rows are not trained. Modules that
have one weight object share it.

Letters: N ids of a lookup, D width of a row.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dphybrid.embedding.lookup import Counters
from dphybrid.embedding.storage import zero_rows
from dphybrid.util.errors import UserError


class FrozenRows:
    """Rows that get no gradient, ascending. Asking for ids takes as long for many rows as for a few."""

    def __init__(self, rows: Iterable[int] = ()) -> None:
        self.rows = sorted(set(rows))
        self._mask: Tensor | None = None

    def has(self, ids: Tensor) -> Tensor:
        """Return, for each id, whether it is one of the rows, of which there is at least one."""
        if len(self.rows) == 1:
            return ids == self.rows[0]
        behind = self.rows[-1] + 1
        if self._mask is None:
            rows = torch.tensor(self.rows, device="cpu")
            self._mask = zero_rows((behind + 1,), torch.bool).index_fill_(0, rows, True)
        return self._mask[ids.clamp(max=behind)]

    def left_out(self, ids_N: Tensor, grads_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids (on the CPU) and gradients (on any device) without those of these rows."""
        if not self.rows or not bool((frozen_N := self.has(ids_N)).any()):
            return ids_N, grads_ND
        kept = (~frozen_N).nonzero().squeeze(1)
        return ids_N[kept], grads_ND.index_select(0, kept.to(grads_ND.device))


@dataclass
class RowsInfo:
    """What optimizers and gradients need to know about one weight; no two weights share one.

    Attributes:
        name, counters: Of the table that had the weight first.
        make_states: Allocates an optimizer's states in the same kind of storage as the rows (such as files).
        padding: Rows that never get a gradient.
        stored: What has the rows if the weight has not: the files of a published table, or all ranks.
        numbers_of: Function from rows of the weight to their numbers in the table; None: they are equal.
        changes: (version before, version after, changed rows) of the latest updates; None: not recorded.
    """

    name: str
    counters: Counters
    make_states: Callable[[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], dict[str, Tensor]]
    padding: Sequence[int] = ()
    stored: object = None
    numbers_of: Callable[[Tensor], Tensor] | None = None
    changes: deque[tuple[int, int, Tensor]] | None = None
    _applied: tuple[weakref.ref[Tensor], int] | None = None

    def __post_init__(self) -> None:
        self.freeze(())

    def freeze(self, rows: Iterable[int]) -> None:
        """Set the rows without a gradient: these, and padding."""
        self.frozen = FrozenRows((*self.padding, *rows))

    def refuse_twice(self, weight: Tensor, optimizer: object) -> None:
        """Note that an optimizer applies the weight's gradient. Raises UserError if another one has applied
        it already."""
        grad, before = weight.grad, self._applied
        if before is not None and before[0]() is grad and before[1] != id(optimizer):
            raise UserError(
                f"table {self.name!r}: two row optimizers apply the same gradient, so each step would change "
                "its rows twice; give the table to one of them"
            )
        self._applied = None if grad is None else (weakref.ref(grad), id(optimizer))

    def __reduce__(self) -> Any:  # a copied or loaded weight gets its info from its table
        return type(None), ()


def info_of(weight: Tensor) -> RowsInfo | None:
    """Return the info of a table's weight, or None for the weight of another module."""
    return getattr(weight, "rows_info", None)


def info_of_table(weight: object) -> RowsInfo:
    """Return the info of a table's weight. Raises UserError for anything else."""
    info = info_of(weight) if isinstance(weight, Tensor) else None
    if info is None:
        what = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise UserError(
            f"row optimizer: {what} is not a table; give it only the tables' weights, and other parameters "
            "to a torch.optim optimizer"
        )
    return info


def all_rows(weight: Tensor) -> Any:
    """Return what holds a weight's rows: the weight itself, without autograd, or what has them in its place
    (`RowsInfo.stored`)."""
    info = info_of(weight)
    return weight.detach() if info is None or info.stored is None else info.stored
