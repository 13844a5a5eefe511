"""What is known of a step's update before the step: where each touched row's gradients will lie, and which of
the rows the next batch needs. A worker finds it out beside the step before.

The rows that the next batch needs are updated first, so that its forward can be launched; the others are
updated while the devices compute. Rows do not depend on each other, so the order changes no bit.

Letters: S shares of a batch's lookups, N their unique ids one after the other, U unique ids among those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dphybrid.embedding import kernels
from dphybrid.embedding.kernels import Arranged, Segment

if TYPE_CHECKING:
    from dphybrid.embedding.ahead import Lookup

WORTH_BYTES = 2**18
"""Of rows that can wait: below this, handing them to another thread costs more than updating them."""


@dataclass(frozen=True)
class Rows:
    """Some of a plan's rows: their ids, ascending, and where in the plan's places their gradients lie."""

    ids_U: Tensor
    bounds_U2: Tensor


@dataclass(frozen=True)
class Halves:
    """A plan's rows in the order in which they are needed. first: those that the next batch reads.

    following: these lookups. places: for each of them, and each of its shares, the places of `first`'s rows.
    """

    first: Rows
    rest: Rows
    following: Sequence["Lookup"]
    places: Sequence[Sequence[Tensor]]


class UpdatePlan:
    """The update that a batch's lookups of one table will lead to, but for the gradients.

    lookups: in the order in which they will be used. frozen: rows, ascending, that are not updated.
    row_bytes: of a gradient's row.
    """

    def __init__(
        self, lookups: Sequence["Lookup"], num_rows: int, frozen: Sequence[int], row_bytes: int
    ) -> None:
        self.ids_S = [share.where.unique_U for lookup in lookups for share in lookup.shares]
        self._row_bytes = row_bytes
        # At address 0 with rows of a byte: an address is a place.
        nowhere = torch.empty((0, 1), dtype=torch.uint8)
        found = kernels.arrange([(Segment(torch.cat(self.ids_S), nowhere), 0)], num_rows, frozen)
        self.rows = Rows(found.keys_U, found.bounds_U2)
        sizes = torch.tensor([len(ids_U) for ids_U in self.ids_S])
        self._starts_S = (sizes.cumsum(0) - sizes) * row_bytes
        self._share_N = torch.bucketize(found.places_N, sizes.cumsum(0)[:-1], right=True)
        self._places_N = found.places_N.mul_(row_bytes)
        self.halves: Halves | None = None

    def arranged(self, segments: Sequence[Segment]) -> Arranged | None:
        """Return where the gradients lie, now that they have come, or None when others than planned have."""
        fit = len(segments) == len(self.ids_S) and all(
            segment.ids_N is ids_U
            and segment.sources_N is None
            and segment.rows_XD.stride(0) * segment.rows_XD.element_size() == self._row_bytes
            for segment, ids_U in zip(segments, self.ids_S, strict=True)
        )
        if not fit:
            return None
        shift_S = torch.tensor([segment.rows_XD.data_ptr() for segment in segments]) - self._starts_S
        places_N = shift_S.index_select(0, self._share_N).add_(self._places_N)
        return Arranged(self.rows.ids_U, self.rows.bounds_U2, places_N, None, list(segments))

    def made(self, arranged: Arranged) -> bool:
        """Is this what `arranged` has returned?"""
        return arranged.keys_U is self.rows.ids_U

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
        if len(rest.ids_U) * self._row_bytes >= WORTH_BYTES:
            self.halves = Halves(first, rest, following, places)

    def _some(self, chosen_U: Tensor) -> Rows:
        places = chosen_U.nonzero().squeeze(1)
        return Rows(self.rows.ids_U.index_select(0, places), self.rows.bounds_U2.index_select(0, places))
