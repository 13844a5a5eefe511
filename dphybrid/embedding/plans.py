"""What is known of a step's update before the step: where each touched row's gradients will lie, and which of
the rows the next batch needs. A worker finds it out beside the step before, table by table; tables that are
updated together have their plans put one behind the other.

The rows that the next batch needs are updated first, so that its forward can be launched; the others are
updated while the devices compute. Rows do not depend on each other, so the order changes no bit.

Letters: S shares of a batch's lookups, N their unique ids one after the other, U unique ids among those, T
tables that are updated together.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dphybrid.embedding import native
from dphybrid.embedding.native import Arranged, Segment

if TYPE_CHECKING:
    from dphybrid.embedding.ahead import Lookup

WORTH_BYTES = 2**18
"""Of rows that can wait: below this, handing them to another thread costs more than updating them."""


@dataclass(frozen=True)
class Rows:
    """Some rows of one table or, with keys of `native.Arranged` in the place of ids, of several: ascending,
    and from where to where in the places of their gradients each one's lie."""

    ids_U: Tensor
    bounds_U2: Tensor


_NO_ROWS = Rows(torch.empty(0, dtype=torch.int64), torch.empty((0, 2), dtype=torch.int32))


@dataclass(frozen=True)
class Halves:
    """A plan's rows in the order in which they are needed. first: those that the next batch reads, or all
    while that is not known.

    following: these lookups. places: for each of them, and each of its shares, the places of `first`'s rows.
    """

    first: Rows
    rest: Rows = _NO_ROWS
    following: Sequence["Lookup"] = ()
    places: Sequence[Sequence[Tensor]] = ()


class UpdatePlan:
    """The update that a batch's lookups of one table will lead to, but for the gradients.

    lookups: in the order in which they will be used. frozen: rows, ascending, that are not updated.
    row_bytes: of a gradient's row.
    """

    def __init__(
        self, lookups: Sequence["Lookup"], num_rows: int, frozen: Sequence[int], row_bytes: int
    ) -> None:
        self.ids_S = [share.where.unique_U for lookup in lookups for share in lookup.shares]
        self.row_bytes = row_bytes
        found = native.arrange([(Segment(torch.cat(self.ids_S), native.PLACES), 0)], num_rows, frozen)
        self.rows = Rows(found.keys_U, found.bounds_U2)
        sizes = torch.tensor([len(ids_U) for ids_U in self.ids_S])
        self._starts_S = (sizes.cumsum(0) - sizes) * row_bytes
        self._share_N = torch.bucketize(found.places_N, sizes.cumsum(0)[:-1], right=True)
        self._places_N = found.places_N.mul_(row_bytes)
        self._addresses_S: list[int] = []
        self._found_N = self._places_N
        self.halves = Halves(self.rows)

    def places(self, segments: Sequence[Segment]) -> Tensor | None:
        """Return where the gradients lie, now that they have come, or None when others than planned have."""
        fit = len(segments) == len(self.ids_S) and all(
            segment.ids_N is ids_U
            and segment.sources_N is None
            and segment.rows_XD.stride(0) * segment.rows_XD.element_size() == self.row_bytes
            for segment, ids_U in zip(segments, self.ids_S, strict=True)
        )
        if not fit:
            return None
        addresses_S = [segment.rows_XD.data_ptr() for segment in segments]
        if addresses_S != self._addresses_S:  # clipping has asked before the update
            shift_S = torch.tensor(addresses_S) - self._starts_S
            self._found_N = shift_S.index_select(0, self._share_N).add_(self._places_N)
            self._addresses_S = addresses_S
        return self._found_N

    def link(self, following: Sequence["Lookup"], mark_V: Tensor) -> None:
        """Divide the rows by what the next batch's lookups read. mark_V: a byte a row of the table, zeros
        before and after."""
        for lookup in following:
            for share in lookup.shares:
                mark_V.index_fill_(0, share.where.unique_U, 1)
        is_first_U = mark_V.index_select(0, self.rows.ids_U)
        for lookup in following:
            for share in lookup.shares:
                mark_V.index_fill_(0, share.where.unique_U, 0)
        mark_V.index_fill_(0, self.rows.ids_U, 1)
        places = [
            [mark_V.index_select(0, share.where.unique_U).nonzero().squeeze(1) for share in lookup.shares]
            for lookup in following
        ]
        mark_V.index_fill_(0, self.rows.ids_U, 0)
        rest, first = self._some(is_first_U == 0), self._some(is_first_U != 0)
        self.halves = Halves(first, rest, following, places)

    def _some(self, chosen_U: Tensor) -> Rows:
        places = chosen_U.nonzero().squeeze(1)
        return Rows(self.rows.ids_U.index_select(0, places), self.rows.bounds_U2.index_select(0, places))


@dataclass
class Planned(Arranged):
    """The gradients of several tables, arranged by their plans alone. plans, segments: of each table; no plan
    where it has no gradients. first_keys, first_places: where each table's begin."""

    plans: Sequence[UpdatePlan | None]
    segments: Sequence[Sequence[Segment]]
    first_keys: Sequence[int]
    first_places: Sequence[int]

    def halves(self) -> list[Halves] | None:
        """Return the halves of each table, None where too few rows can wait for another thread to be
        worth it."""
        none = Halves(_NO_ROWS)
        found = [none if plan is None else plan.halves for plan in self.plans]
        row_bytes = next(plan.row_bytes for plan in self.plans if plan is not None)
        worth_it = sum(len(halves.rest.ids_U) for halves in found) * row_bytes >= WORTH_BYTES
        return found if worth_it else None

    def together(self, rows_T: Sequence[Rows]) -> Rows:
        """Return some rows of each table as rows of all."""
        return _together(rows_T, self.first_keys, self.first_places)


def _together(rows_T: Sequence[Rows], first_keys: Sequence[int], first_places: Sequence[int]) -> Rows:
    if len(rows_T) == 1:
        return rows_T[0]
    keys = [rows.ids_U + first for rows, first in zip(rows_T, first_keys, strict=True)]
    bounds = [rows.bounds_U2 + first for rows, first in zip(rows_T, first_places, strict=True)]
    return Rows(torch.cat(keys), torch.cat(bounds))


def arrange_planned(
    plans: Sequence[UpdatePlan | None], segments: Sequence[Sequence[Segment]], first_keys: Sequence[int]
) -> Planned | None:
    """Return where the gradients of several tables lie, or None when others than planned have come."""
    used = [plan if own else None for plan, own in zip(plans, segments, strict=True)]
    found: list[Tensor] = []
    for plan, own in zip(used, segments, strict=True):
        places_N = plan.places(own) if plan is not None else None if own else _NO_ROWS.ids_U
        if places_N is None:
            return None
        found.append(places_N)
    if not any(used):
        return None
    ends = [*itertools.accumulate([len(each) for each in found], initial=0)]
    rows_T = [_NO_ROWS if plan is None else plan.rows for plan in used]
    rows = _together(rows_T, first_keys, ends[:-1])
    places_N = found[0] if len(found) == 1 else torch.cat(found)
    held = [segment for own in segments for segment in own]
    return Planned(rows.ids_U, rows.bounds_U2, places_N, None, held, used, segments, first_keys, ends[:-1])
