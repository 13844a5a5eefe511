"""Ids of a lookup: checked, where each one occurs in a replica's share, the sum of gradients over its
occurrences on the replica's device, and the counters that explain a slow run.

Letters: N ids of a lookup, flattened, U unique ids among them, P pieces of their occurrences, D width of a
row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dphybrid.embedding import native
from dphybrid.util.errors import UserError

_PIECE_BITS = 6
PIECE = 1 << _PIECE_BITS
"""Occurrences of an id whose gradients are summed in one go. On a GPU one thread sums a column of them, and
the others would wait for an id that occurs thousands of times."""


@dataclass
class Counters:
    """Running totals of a table in training; lookups without gradients do not count. Only the thread that
    trains adds to them.

    ids: looked up. unique: touched rows, counted by replica. prepared: of those, rows that a pipeline had
    made ready. repaired: of those, rows read again because an update had changed them. bytes_gathered: of
    rows read from the table for lookups.
    Milliseconds: dedup_ms of checking and sorting ids. gather_ms of reading rows. h2d_ms of copies to the
    devices. d2h_ms of waiting for row gradients from the devices. update_ms of the row optimizer, summing
    included. repair_ms of finding and reading changed rows again.
    """

    ids: float = 0.0
    unique: float = 0.0
    prepared: float = 0.0
    repaired: float = 0.0
    bytes_gathered: float = 0.0
    bytes_to_devices: float = 0.0
    bytes_from_devices: float = 0.0
    dedup_ms: float = 0.0
    gather_ms: float = 0.0
    h2d_ms: float = 0.0
    d2h_ms: float = 0.0
    update_ms: float = 0.0
    repair_ms: float = 0.0


@dataclass(frozen=True)
class Occurrences:
    """Where each unique id occurs among N ids: unique id u is unique_U[u] (sorted, int64).

    order_N: the places of the ids' occurrences, by id. starts_P: where in order_N each piece of at most
    `PIECE` occurrences begins. first_U: each id's first piece; empty where all ids have one. inverse_N: the
    place of each id in unique_U. All but unique_U are int32.
    """

    unique_U: Tensor
    inverse_N: Tensor
    order_N: Tensor
    starts_P: Tensor
    first_U: Tensor

    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what expands unique rows, and sums their gradients; see `replicas.DeviceRows`."""
        return self.inverse_N, self.order_N, self.starts_P, self.first_U


def sort_ids(ids_N: Tensor, num_rows: int) -> Occurrences:
    """Return where each unique id of ids_N (int64, rows of a table of `num_rows`) occurs."""
    unique_U, inverse_N, bounds_U2, places_N = native.occurrences(ids_N, num_rows)
    return Occurrences(unique_U, inverse_N, places_N.int(), *_pieces(bounds_U2))


def _pieces(bounds_U2: Tensor) -> tuple[Tensor, Tensor]:
    """Return (starts_P, first_U) of `Occurrences` that lie in these bounds."""
    starts_U = bounds_U2[:, 0]
    counts_U = (bounds_U2[:, 1] - starts_U + (PIECE - 1)).bitwise_right_shift_(_PIECE_BITS)
    total = int(counts_U.sum())
    if total == len(counts_U):
        return starts_U.contiguous(), torch.empty(0, dtype=torch.int32)
    first_U = counts_U.cumsum(0, dtype=torch.int32) - counts_U
    # Piece p of all is piece p - first_U of its id.
    shift_P = torch.repeat_interleave(starts_U - PIECE * first_U, counts_U, output_size=total)
    return torch.arange(total, dtype=torch.int32).mul_(PIECE).add_(shift_P), first_U


def each_lookup(wanted: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the ids of each lookup of a table, where those of one may stand alone."""
    return [wanted] if isinstance(wanted, Tensor) else wanted


def sum_by_row(grads_ND: Tensor, order_N: Tensor, starts_P: Tensor, first_U: Tensor) -> Tensor:
    """Return grads_UD: the sum of grads_ND over the occurrences of each unique id, on their device: of each
    piece of them in order, then of the pieces."""
    if not order_N.numel():
        return grads_ND.new_zeros(0, grads_ND.shape[1])
    # What nn.functional.embedding_bag(mode="sum") comes down to, without checks that a short step notices.
    summed_PD: Tensor = torch.embedding_bag(grads_ND, order_N, starts_P)[0]
    if not len(first_U):
        return summed_PD
    pieces_P = torch.arange(len(starts_P), dtype=first_U.dtype, device=first_U.device)
    summed_UD: Tensor = torch.embedding_bag(summed_PD, pieces_P, first_U)[0]
    return summed_UD


def whole_numbers(ids: Tensor, name: str) -> Tensor:
    """Return ids of any whole-number type on the CPU, or on `meta`, as int64; name: the table's.

    Raises UserError for ids that are not a tensor, or a nested or sparse one, and for other types.
    """
    if not isinstance(ids, Tensor):
        raise UserError(f"table {name!r}: ids are of type {type(ids).__name__}; give torch.as_tensor(ids)")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise UserError(
            f"table {name!r}: ids are {ids.dtype}; give int64 (a float holds no id above 16,777,216 exactly)"
        )
    if ids.is_nested or ids.layout is not torch.strided:
        raise UserError(
            f"table {name!r}: ids are a nested or sparse tensor; give ids.values(), and make the result "
            "nested with torch.nested.nested_tensor_from_jagged(rows, ids.offsets())"
        )
    ids = ids.long()  # before anything is added to them: narrow types overflow
    return ids if ids.is_cpu or ids.is_meta else ids.cpu()


def row_numbers(ids: Tensor, num_rows: int, name: str) -> Tensor:
    """Return a copy of the ids as `whole_numbers` does, all of them rows of the table. Raises UserError for
    one that is not."""
    ids = whole_numbers(ids, name).clone()  # before the check: the owner of the batch may change it
    if ids.numel():
        # one pass over the ids; which one is wrong is looked for where there is one
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= num_rows:
            raise no_row(ids, num_rows, name)
    return ids


def no_row(ids: Tensor, num_rows: int, name: str) -> UserError:
    """Return the error that names the first of the ids that is not a row of the table."""
    wrong = ((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist()
    return UserError(
        f"table {name!r}: id {int(ids[tuple(wrong)])} at position {wrong} is not a row; rows are 0 to "
        f"{num_rows - 1}"
    )
