"""Ids of a lookup: checks them, finds where each unique id occurs, and sums gradients over the occurrences on
a replica's device. Also the counters that explain a slow run.

Letters: N ids of a lookup, flattened, U unique ids among them, P runs of their occurrences, D width of a
row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from dphybrid.embedding import native
from dphybrid.util.errors import UserError

_RUN_BITS = 6
RUN = 1 << _RUN_BITS
"""Largest number of occurrences of an id that are summed at once. On a GPU one thread sums one column of a
run; all other threads would wait for an id that occurs thousands of times."""


@dataclass
class Counters:
    """Running totals of a table in training; lookups without gradients do not count. Only the training thread
    adds to them.

    Attributes:
        unique: Rows sent to replicas, counted by replica.
        prepared: Those of them that a pipeline had prepared.
        repaired: Prepared rows that were read again because an update had changed them.
        d2h_ms: Milliseconds of waiting for row gradients from the devices.
    """

    unique: float = 0.0
    prepared: float = 0.0
    repaired: float = 0.0
    d2h_ms: float = 0.0


@dataclass(frozen=True)
class Occurrences:
    """Where each unique id occurs among N ids.

    Attributes:
        unique_U: The unique ids, ascending (int64; all others are int32).
        inverse_N: The index of each id in unique_U.
        order_N: The positions 0..N-1, sorted by the id there.
        starts_P: Where in order_N each run begins; a run is at most `RUN` occurrences of one id.
        first_U: Index of each id's first run; empty if every id has one run.
    """

    unique_U: Tensor
    inverse_N: Tensor
    order_N: Tensor
    starts_P: Tensor
    first_U: Tensor

    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the indices that expand unique rows and sum their gradients; see `replicas.DeviceRows`."""
        return self.inverse_N, self.order_N, self.starts_P, self.first_U


def sort_ids(ids_N: Tensor, num_rows: int) -> Occurrences:
    """Return where each unique id occurs in ids_N (int64, each below `num_rows`)."""
    unique_U, inverse_N, bounds_U2, positions_N = native.occurrences(ids_N, num_rows)
    return Occurrences(unique_U, inverse_N, positions_N.int(), *_runs(bounds_U2))


def _runs(bounds_U2: Tensor) -> tuple[Tensor, Tensor]:
    """Return (starts_P, first_U) of `Occurrences`, given where each id's occurrences begin and end."""
    starts_U = bounds_U2[:, 0]
    counts_U = (bounds_U2[:, 1] - starts_U + (RUN - 1)).bitwise_right_shift_(_RUN_BITS)
    total = int(counts_U.sum())
    if total == len(counts_U):
        return starts_U.contiguous(), torch.empty(0, dtype=torch.int32, device=native.CPU)
    first_U = counts_U.cumsum(0, dtype=torch.int32) - counts_U
    # Run p of all runs is run p - first_U of its id, so it starts at starts_U + RUN * (p - first_U).
    shift_P = torch.repeat_interleave(starts_U - RUN * first_U, counts_U, output_size=total)
    return torch.arange(total, dtype=torch.int32, device=native.CPU).mul_(RUN).add_(shift_P), first_U


def each_lookup(wanted: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a list of one tensor per lookup; `wanted` may be a single tensor for one lookup."""
    return [wanted] if isinstance(wanted, Tensor) else wanted


def sum_by_row(grads_ND: Tensor, order_N: Tensor, starts_P: Tensor, first_U: Tensor) -> Tensor:
    """Return grads_UD: the sum of grads_ND over each unique id's occurrences, on their device. Sums the
    occurrences of each run in order, then the runs."""
    if not order_N.numel():
        return grads_ND.new_zeros(0, grads_ND.shape[1])
    # The operator below nn.functional.embedding_bag(mode="sum"), whose checks cost noticeable time in a short
    # step.
    summed_PD: Tensor = torch.embedding_bag(grads_ND, order_N, starts_P)[0]
    if not len(first_U):
        return summed_PD
    runs_P = torch.arange(len(starts_P), dtype=first_U.dtype, device=first_U.device)
    summed_UD: Tensor = torch.embedding_bag(summed_PD, runs_P, first_U)[0]
    return summed_UD


def is_integer(value: object) -> bool:
    """Whether it is an integer: neither 1e6, which is a float, nor True, which would be row 1."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole_numbers(ids: Tensor, name: str) -> Tensor:
    """Return ids of any integer type as int64 on the CPU (`meta` stays). name: the table's, for messages.

    Raises UserError for other types, for nested and sparse tensors, and for ids that are not a tensor.
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
    ids = ids.long()  # first of all: adding a table's start to narrow types would overflow
    return ids if ids.is_cpu or ids.is_meta else ids.cpu()


def row_numbers(ids: Tensor, num_rows: int, name: str) -> Tensor:
    """Return a copy of the ids, converted as by `whole_numbers`. Raises UserError if one is not a row of the
    table."""
    # Copied before the check: the owner of the batch may change it at any time, and the lookup must use the
    # ids that were checked.
    ids = whole_numbers(ids, name).clone()
    if ids.numel():
        # One fast pass over the ids; `not_a_row` looks for the wrong one only if there is one.
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= num_rows:
            raise not_a_row(ids, num_rows, name)
    return ids


def not_a_row(ids: Tensor, num_rows: int, name: str) -> UserError:
    """Return the error for the first id that is not a row of its table."""
    wrong = ((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist()
    return UserError(
        f"table {name!r}: id {int(ids[tuple(wrong)])} at position {wrong} is not a row; rows are 0 to "
        f"{num_rows - 1}"
    )


def not_differentiable() -> UserError:
    """Return the error for a derivative that tables do not have."""
    return UserError(
        "a table in host memory has no derivatives by torch.func, in forward mode, of batches "
        "(is_grads_batched) or of second order (create_graph); use nn.Embedding for them"
    )
