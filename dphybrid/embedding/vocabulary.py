"""From ids of any size to rows of a table: by hashing, or by giving each new id the next free row.

Rows 0 to `unknown_rows` - 1 are reserved for ids that have no row of their own. An id always means the same
of these rows, so that rare ids are told apart a little even there.
"""

from typing import Self

import torch
from torch import Tensor, nn

from dphybrid.embedding.lookup import int64_ids
from dphybrid.util.errors import UserError

_INT64_SIGN = -(2**63)

_LATELY = 2**16
"""Ids that a growing vocabulary adds before it sorts all of them anew."""


def mixed(ids: Tensor, seed: int = 0) -> Tensor:
    """Return int64 ids, any shape, as well-spread values from 0 to 2**63 - 1: the finalizer of splitmix64
    (Steele et al. 2014)."""
    values = ids + _signed(0x9E3779B97F4A7C15 * (seed + 1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return (values ^ _shifted(values, 31)) & ~_INT64_SIGN


def _signed(value: int) -> int:
    # torch multiplies no uint64; int64 that wraps round has the same bits
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: Tensor, places: int) -> Tensor:
    """Shift right as unsigned numbers are."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def _check(num_rows: int, unknown_rows: int) -> None:
    if not 0 < unknown_rows < num_rows:
        raise UserError(
            f"vocabulary: unknown_rows={unknown_rows} of num_rows={num_rows}; reserve at least 1 and leave "
            "at least 1"
        )


class HashedVocabulary:
    """Each id has a row by its hash; some share one. No id is unknown, but for `missing`, which stands for
    "no value".

    num_rows: of the table. unknown_rows: reserved, of which `missing` has the first. seed: of the hash.
    Raises UserError for sizes that do not go together.
    """

    def __init__(self, num_rows: int, *, unknown_rows: int = 1, seed: int = 0, missing: int = -1) -> None:
        _check(num_rows, unknown_rows)
        self.num_rows, self.unknown_rows, self.seed, self.missing = num_rows, unknown_rows, seed, missing

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows of ids of a whole-number type, any shape. Raises UserError for other types."""
        ids = int64_ids(ids, "HashedVocabulary")
        rows = mixed(ids, self.seed).remainder_(self.num_rows - self.unknown_rows).add_(self.unknown_rows)
        return rows.masked_fill_(ids == self.missing, 0)


class GrowingVocabulary(nn.Module):
    """Each id that training meets gets the next free row; ids met in evaluation only, or when all rows are
    taken, get a reserved one.

    num_rows: of the table. unknown_rows: reserved. Part of a model, it is saved and loaded with it. Finding
    rows takes the time of a binary search; new ids are added in blocks, so that a step does not pay for the
    whole vocabulary. With a pipeline, map ids where batches are made or in `table_ids`, in the order of
    training: then a row does not depend on the prefetching. Raises UserError for sizes that do not go
    together.
    """

    ids_V: Tensor
    used: Tensor

    def __init__(self, num_rows: int, *, unknown_rows: int = 1) -> None:
        super().__init__()
        _check(num_rows, unknown_rows)
        self.num_rows, self.unknown_rows = num_rows, unknown_rows
        self.register_buffer("ids_V", torch.zeros(num_rows, dtype=torch.int64))
        self.register_buffer("used", torch.tensor([unknown_rows]))
        self._index()

    def _apply(self, fn: object, recurse: bool = True) -> Self:
        return self  # stays on the CPU, with the table

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._index()

    def _index(self) -> None:
        """Make the sorted lists of known ids anew: a long one, and a short one of those added lately."""
        ids = self.ids_V[self.unknown_rows : int(self.used)]
        self._known = [torch.sort(ids), torch.sort(ids[:0])]
        self._first_of = [self.unknown_rows, int(self.used)]

    def __len__(self) -> int:
        return int(self.used) - self.unknown_rows

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids of a whole-number type, any shape. In training mode, ids without a row get
        one as long as there are free ones, in the order in which they stand. Raises UserError for other
        types."""
        ids = int64_ids(ids, "GrowingVocabulary").cpu()
        rows = self._find(ids)
        if self.training and int(self.used) < self.num_rows and bool((rows < 0).any()):
            self._add(ids[rows < 0])
            rows = self._find(ids)
        return rows.where(rows >= 0, mixed(ids).remainder_(self.unknown_rows))

    def _find(self, ids: Tensor) -> Tensor:
        found = torch.full_like(ids, -1)
        for (known_K, order_K), first in zip(self._known, self._first_of, strict=True):
            if len(known_K):
                place = torch.searchsorted(known_K, ids.contiguous()).clamp_(max=len(known_K) - 1)
                found = found.where(known_K[place] != ids, order_K[place] + first)
        return found

    def _add(self, ids_N: Tensor) -> None:
        # torch.unique sorts by value; rows go by first appearance, whatever the batches are
        _, first_of_N = torch.unique(ids_N, return_inverse=True)
        first_U = torch.full((int(first_of_N.max()) + 1,), len(ids_N)).scatter_reduce_(
            0, first_of_N, torch.arange(len(ids_N)), "amin"
        )
        fresh = ids_N[first_U.sort().values][: self.num_rows - int(self.used)]
        start = int(self.used)
        self.ids_V[start : start + len(fresh)] = fresh
        self.used += len(fresh)
        lately = self.ids_V[self._first_of[1] : int(self.used)]
        if len(lately) > max(_LATELY, len(self) // 8):
            self._index()
        else:
            self._known[1] = torch.sort(lately)
