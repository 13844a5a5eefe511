"""The C kernels of tables as functions of tensors.

Each function checks device, type, layout, length and range of its arguments, and keeps them alive during the
call. Ids are copied before use, so a caller who changes them meanwhile cannot make a kernel access memory
outside of the table.

Letters: N ids of a lookup, U unique keys, D width of a row, V rows of a table.
"""

import ctypes as c
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import dphybrid.kernels as kernels
from dphybrid.kernels import PUBLISHED, SCALES, STORED, address, is_plain, team
from dphybrid.util.errors import UserError

MAX_DIM = 16384
"""Most values of a row: a kernel sums a row's gradients on its stack. The same as MAX_DIM of rows.c."""

# A torch.device, not the text "cpu": torch would parse the text for each new tensor.
CPU = torch.device("cpu")

_LARGEST_BETA = 0.99999
"""With a larger beta, Adam's bias corrections would take more than 4 million steps to reach 1: too long a
table."""


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of looked-up rows, gradients and states of rows stored as `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows_address(weight_VD: Tensor) -> tuple[int, int, int]:
    """Return (address, rows, width) of a table's rows."""
    if weight_VD.dim() != 2 or weight_VD.dtype not in STORED or not 1 <= weight_VD.shape[1] <= MAX_DIM:
        raise TypeError(
            f"a table of shape {tuple(weight_VD.shape)} of {weight_VD.dtype}; give (rows, 1 to {MAX_DIM}) of "
            "float32, float64 or bfloat16"
        )
    return address(weight_VD, "table", weight_VD.dtype, weight_VD.shape), *weight_VD.shape


class StoredRows:
    """Frozen rows (num_rows, dim) of a published table as its files hold them; lookups give them as float32.

    pieces: tensors (rows, dim) of one type of `kernels.PUBLISHED`, which follow each other. scale: factor of
    all rows (one value), of each row (rows, 1), or of each block of values (rows, blocks); None: there is
    none. Its type is one of `kernels.SCALES`.
    """

    dtype = torch.float32
    """Of looked-up rows."""

    def __init__(self, pieces: Sequence[Tensor], scale: Tensor | None = None) -> None:
        self.pieces, self.scale = pieces, scale
        first, counts = pieces[0], [len(piece) for piece in pieces]
        self.shape = torch.Size((sum(counts), first.shape[1]))
        self.row_bytes = first.shape[1] * first.element_size()
        starts = [sum(counts[:number]) for number in range(len(pieces))]
        self._starts = (c.c_int64 * len(pieces))(*starts)
        addresses = [address(piece, "piece", first.dtype, (len(piece), self.shape[1])) for piece in pieces]
        self._addresses = (c.c_void_p * len(pieces))(*addresses)
        per_row = 0 if scale is None or scale.numel() == 1 else scale.shape[1]
        if scale is not None and (self.shape[1] % 32 if per_row > 1 else per_row and len(scale) != len(self)):
            raise TypeError(f"scales of shape {tuple(scale.shape)} for rows of shape {tuple(self.shape)}")
        scale_at = None if scale is None else address(scale, "scales", scale.dtype, scale.shape)
        self.arguments = (
            None, *self.shape, PUBLISHED[first.dtype], c.addressof(self._addresses),
            c.addressof(self._starts), len(pieces), None, scale_at,
            0 if scale is None else SCALES[scale.dtype], per_row,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.shape[0]

    def data_ptr(self) -> int:
        """Return the address of the first row."""
        return self.pieces[0].data_ptr()


def look_up(
    weight_VD: Tensor | StoredRows, ids: Tensor, out_XD: Tensor | None = None, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (the rows of `ids` (int64), flat_N: a flat copy of the ids). bfloat16 rows come as float32.

    out_XD: memory for the rows. threads: the most to use; None: torch's number if the lookup is large enough.
    Raises IndexError if an id is not a row; `args[0]` is its position in the flat ids.
    """
    real, ids, count = real_dtype(weight_VD.dtype), ids.contiguous(), ids.numel()
    flat_N = torch.empty(count, dtype=torch.int64, device=CPU)
    if isinstance(weight_VD, StoredRows):
        row_bytes, places_N = weight_VD.row_bytes, torch.empty_like(flat_N)
        table = (*weight_VD.arguments[:7], places_N.data_ptr(), *weight_VD.arguments[8:])
    else:
        row_bytes = weight_VD.shape[-1] * weight_VD.element_size()
        table = (*_rows_address(weight_VD), STORED[weight_VD.dtype], None, None, 0, None, None, 0, 0)
    dim = weight_VD.shape[-1]
    if out_XD is None:
        out_XD = torch.empty((*ids.shape, dim), dtype=real, device=CPU)
    call = kernels.Lookup(
        team(count, row_bytes, threads), address(ids, "ids", torch.int64, ids.shape), count, *table,
        address(out_XD, "looked-up rows", real, (*ids.shape, dim)), flat_N.data_ptr(),
    )  # fmt: skip
    if not kernels.call("look_up", call):
        raise IndexError(call.wrong)
    return out_XD, flat_N


_PLACES = torch.empty((0, 1), dtype=torch.uint8, device=CPU)
"""Passed instead of gradients to get the positions of ids' occurrences, not the addresses of gradients."""


class Segment(NamedTuple):
    """Ids (int64) of a table of `num_rows` rows and their gradients: that of ids_N[n] is rows_ND[n]."""

    ids_N: Tensor
    rows_ND: Tensor
    num_rows: int


class _Arranged(NamedTuple):
    """Arguments and results of the kernel `arrange`: the ascending unique ids, and for each the addresses of
    its gradients, in order of occurrence. memory: holds unique ids, bounds and positions. held: the objects
    that addresses in `call` point to, kept alive."""

    call: c.Structure
    memory: Tensor
    inverse_N: Tensor | None
    held: object

    @property
    def ids_U(self) -> Tensor:
        """The unique ids, ascending."""
        return self.memory[: self.call.num_unique]


def _gradients(rows_ND: Tensor, count: int) -> tuple[int | None, int]:
    """Return (address, bytes from one row to the next)."""
    if rows_ND is _PLACES:
        return None, 1
    gaps = rows_ND.numel() > 0 and rows_ND.shape[-1] > 1 and rows_ND.stride(-1) != 1
    if not is_plain(rows_ND) or rows_ND.dim() != 2 or len(rows_ND) != count or gaps:
        raise TypeError(
            f"gradients of shape {tuple(rows_ND.shape)}, strides {rows_ND.stride()}, of {count} ids"
        )
    return rows_ND.data_ptr(), rows_ND.stride(0) * rows_ND.element_size()


def _arrange_arguments(segments: Sequence[Segment], *, inverse: bool = False) -> _Arranged:
    """Return the arguments of a stable sort of the ids of a table's segments, and memory for its results."""
    lines, held, count = (kernels.Segment * len(segments))(), [], 0
    for line, (ids, rows_ND, _) in zip(lines, segments, strict=True):
        ids_N = ids.contiguous()
        own = ids_N.shape[0]
        line.ids, line.count = address(ids_N, "ids", torch.int64, (own,)), own
        line.rows, line.row_bytes = _gradients(rows_ND, own)
        held.append((ids_N, rows_ND))
        count += own
    # With one segment, a gradient's address follows from its id's position. Otherwise the kernel lists the
    # addresses before it sorts.
    direct = len(segments) == 1
    # Results: keys, bounds, positions. Scratch: two words per id, and the list of addresses unless `direct`.
    memory = torch.empty((5 if direct else 6) * count, dtype=torch.int64, device=CPU)
    keys = memory.data_ptr()
    bounds, positions, words, unsorted = (keys + n * 8 * count for n in (1, 2, 3, 5))
    inverse_N = torch.empty(count, dtype=torch.int32, device=CPU) if inverse else None
    call = kernels.Arrange(
        c.addressof(lines), len(segments), count, segments[0].num_rows, words, None if direct else unsorted,
        keys, bounds, positions, None if inverse_N is None else inverse_N.data_ptr(),
    )  # fmt: skip
    return _Arranged(call, memory, inverse_N, (lines, held))


def _refusal(arranged: _Arranged, segments: Sequence[Segment]) -> Exception:
    call = arranged.call
    if call.wrong_segment < 0:
        return UserError(
            f"{call.count:,} ids of {call.num_rows:,} rows at once: their numbers do not fit into 64 bits; "
            "use smaller batches"
        )
    wrong = segments[call.wrong_segment].ids_N[call.wrong_place]
    return IndexError(f"the gradient of row {int(wrong)}, which its table lacks")


def _arrange(segments: Sequence[Segment], *, inverse: bool = False) -> _Arranged:
    """Sort the ids of segments; see `_arrange_arguments`."""
    arranged = _arrange_arguments(segments, inverse=inverse)
    if not kernels.call("arrange", arranged.call):
        raise _refusal(arranged, segments)
    return arranged


def occurrences(ids_N: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (unique_U, inverse_N, bounds_U2, positions_N).

    unique_U: the unique ids, ascending (int64). inverse_N: each id's index among them (int32). positions_N:
    positions in ids_N, sorted by the id there (int64). bounds_U2: first and end of each unique id's positions
    in positions_N (int32).
    """
    arranged = _arrange([Segment(ids_N, _PLACES, num_rows)], inverse=True)
    assert arranged.inverse_N is not None
    count, unique = len(ids_N), arranged.call.num_unique
    bounds_U2 = arranged.memory[count : count + unique].view(torch.int32).view(unique, 2)
    return arranged.ids_U, arranged.inverse_N, bounds_U2, arranged.memory[2 * count : 3 * count]


def sum_rows(
    segments: Sequence[Segment], *, gap: int = 0, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the gradients of each row. Return (ids_U, sums_UD, squares_U): the unique ids of segments of one
    table, ascending, the sums of their gradients, and the sums' squared 2-norms (float64).

    gap: unused values between one sum and the next in memory. squares: whether to compute squares_U, which is
    empty otherwise. Raises UserError if an id and its position do not fit into 64 bits together, IndexError
    for an id that is not a row.
    """
    first = segments[0].rows_ND
    arranged = _arrange(segments)
    ids_U, dim, dtype = arranged.ids_U, first.shape[1], first.dtype
    count = len(ids_U)
    out_UX = torch.empty((count, dim + gap), dtype=dtype, device=CPU)
    squares_U = torch.empty(count if squares else 0, dtype=torch.float64, device=CPU)
    call = kernels.Sums(
        team(count, dim * out_UX.element_size()), c.addressof(arranged.call), dim, STORED[dtype],
        out_UX.data_ptr(), dim + gap, squares_U.data_ptr() if squares else None,
    )  # fmt: skip
    if count and not kernels.call("sum_rows", call):
        raise TypeError(f"rows of {dim} values of {dtype}; use 1 to {MAX_DIM} of float32 or float64")
    return ids_U, out_UX[:, :dim] if gap else out_UX, squares_U


class Rule(NamedTuple):
    """How an update changes a touched row. number: the value in `enum rule` of rows.c."""

    number: int
    lr: float
    decay: float
    eps: float
    beta1: float
    beta2: float


@lru_cache(maxsize=8)
def corrections(beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Return Adam's bias corrections 1 / (1 - beta1 ** k) and 1 / sqrt(1 - beta2 ** k) for k = 0, 1, ...
    until both are 1 in float64. A table, as computing them for every row takes longer.

    Raises UserError for a beta below 0 or above `_LARGEST_BETA`.
    """
    if not (0 <= beta1 <= _LARGEST_BETA and 0 <= beta2 <= _LARGEST_BETA):
        raise UserError(f"row optimizer: betas={beta1, beta2}; give values from 0 to {_LARGEST_BETA}")
    largest = max(beta1, beta2)
    # beta ** last is below 2 ** -60: subtracting it from 1 changes nothing in float64.
    last = 1 if largest == 0 else math.ceil(-60 * math.log(2) / math.log(largest)) + 1
    steps = torch.arange(last + 1, dtype=torch.float64, device=CPU)
    first, second = (-torch.expm1(steps * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2))
    return first.reciprocal_(), second.rsqrt_()


def update(
    rule: Rule,
    weight_VD: Tensor,
    states: Mapping[str, tuple[Tensor, tuple[int, ...], torch.dtype]],
    segment: Segment,
    updates: int = 0,
    noise: int = 0,
) -> Tensor:
    """Update the rows and states for which the segment has gradients; return the rows' numbers, ascending.

    states: field of `struct update` -> state, its shape and type. updates, noise: see there. Raises what
    `sum_rows` raises.
    """
    rows, num_rows, dim = _rows_address(weight_VD)
    arranged, stored = _arrange_arguments([segment]), weight_VD.dtype
    fix1, fix2 = corrections(rule.beta1, rule.beta2)
    # The team is chosen by the number of ids: how many are unique is known only within the call.
    call = kernels.Update(
        team(arranged.call.count, dim * stored.itemsize), c.addressof(arranged.call), *rule, STORED[stored],
        dim, fix1.data_ptr(), fix2.data_ptr(), len(fix1) - 1, num_rows, updates, noise, rows,
    )  # fmt: skip
    for name, (state, shape, dtype) in states.items():
        setattr(call, name, address(state, name, dtype, shape))
        if name != "steps":
            setattr(call, f"{name}_values", dim if len(shape) > 1 else 1)
    if not kernels.call("update_rows", call):
        raise _refusal(arranged, [segment])
    return arranged.ids_U
