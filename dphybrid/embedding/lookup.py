"""Where each id of a replica's share occurs, and the sum of gradients over its occurrences on the replica's
device.

Letters: N ids of a lookup, flattened, U unique ids among them, D width of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dphybrid.embedding import kernels
from dphybrid.util.errors import UserError


@dataclass(frozen=True)
class Occurrences:
    """Where each unique id occurs among N ids: unique id u is unique_U[u] (sorted, int64), at
    order_N[starts_U[u] : starts_U[u + 1]].

    inverse_N: the place of each id in unique_U. All but unique_U are int32.
    """

    unique_U: Tensor
    order_N: Tensor
    starts_U: Tensor
    inverse_N: Tensor


def sort_ids(ids_N: Tensor, num_rows: int) -> Occurrences:
    """Return where each unique id of ids_N (int64, rows of a table of `num_rows`) occurs."""
    # at address 0 with rows of a byte: an address is a place
    nowhere = torch.empty((0, 1), dtype=torch.uint8)
    found = kernels.arrange([(kernels.Segment(ids_N, nowhere), 0)], num_rows, inverse=True)
    assert found.inverse_N is not None
    return Occurrences(
        found.keys_U, found.places_N[: len(ids_N)].int(), found.bounds_U2[:, 0].contiguous(), found.inverse_N
    )


def all_in_range(ids: Tensor, end: int) -> bool:
    """Are all ids from 0 to below `end`?"""
    if not ids.numel():
        return True
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < end


def sum_by_row(grads_ND: Tensor, order_N: Tensor, starts_U: Tensor) -> Tensor:
    """Return grads_UD: the sum of grads_ND over the occurrences of each unique id, on their device."""
    if not order_N.numel():
        return grads_ND.new_zeros(0, grads_ND.shape[1])
    # What nn.functional.embedding_bag(mode="sum") comes down to, without its checks, which a short step would
    # notice.
    summed_UD: Tensor = torch.embedding_bag(grads_ND, order_N, starts_U)[0]
    return summed_UD


def whole_numbers(ids: Tensor, name: str) -> Tensor:
    """Return ids on the CPU as int64. Raises UserError for another type than int64 or int32; name: the
    table's."""
    if ids.dtype == torch.int32:
        ids = ids.long()
    if ids.dtype != torch.int64:
        raise UserError(
            f"table {name!r}: ids are {ids.dtype}; give int64 (a float holds no id above 16,777,216 exactly)"
        )
    return ids.cpu()


def no_row(ids: Tensor, num_rows: int, name: str) -> UserError:
    """Return the error that names the first of the ids that is no row of the table."""
    wrong = ((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist()
    return UserError(
        f"table {name!r}: id {int(ids[tuple(wrong)])} at position {wrong} is no row; rows are 0 to "
        f"{num_rows - 1}"
    )
