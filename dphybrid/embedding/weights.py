"""What is known of a table's weight beside its values: its name, and which row is padding. Modules that
have one weight object share it.

Letters: N ids of a lookup, D width of a row.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dphybrid.embedding.lookup import Counters
from dphybrid.util.errors import UserError


def without_padding(ids_N: Tensor, grads_ND: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
    """Return ids (on the CPU) and gradients (on any device) without those of the padding row."""
    if padding is None or not bool((is_padding_N := ids_N == padding).any()):
        return ids_N, grads_ND
    kept = (~is_padding_N).nonzero().squeeze(1)
    return ids_N[kept], grads_ND.index_select(0, kept.to(grads_ND.device))


@dataclass
class RowsInfo:
    """What optimizers and gradients need to know about one weight; no two weights share one.

    Attributes:
        name, counters: Of the table that had the weight first.
        make_states: Allocates an optimizer's states in the same kind of storage as the rows (such as files).
        padding: A row that gets no gradient; None: there is none.
        stored: What has the rows if the weight has not: the files of a published table, or all ranks.
        numbers_of: Function from rows of the weight to their numbers in the table; None: they are equal.
        changes: (version before, version after, changed rows) of the latest updates; None: not recorded.
    """

    name: str
    counters: Counters
    make_states: Callable[[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], dict[str, Tensor]]
    padding: int | None
    stored: object = None
    numbers_of: Callable[[Tensor], Tensor] | None = None
    changes: deque[tuple[int, int, Tensor]] | None = None

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
