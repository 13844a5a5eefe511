"""The kernels of tables as functions of tensors.

Each function checks device, type, layout, length and range of what it is given, and keeps it alive during the
call. Ids are copied, so a buffer that changes later reaches no memory. Every kernel that reads rows which are
mapped from a checkpoint's files has them checked.

Letters: N ids of a lookup, U unique keys, D width of a row, V rows of a table.
"""

import ctypes as c
import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import dphybrid.kernels as kernels
from dphybrid.kernels import STORED, address, is_plain, team
from dphybrid.util.errors import UserError

MAX_DIM = 16384
"""Values of a row: a kernel sums a row's gradients on its stack."""

# not the text "cpu", which torch reads anew for each tensor
CPU = torch.device("cpu")

_LARGEST_BETA = 0.99999
"""Above it the corrections would take 4 million steps to reach 1."""

_CHECKS: dict[int, Callable[[Tensor], None]] = {}
"""Address of such rows -> what checks those of given ids (N,)."""

_CHECKED_AT_ONCE = 2**16


def check_when_read(rows_VD: Tensor, check: Callable[[Tensor], None], memory: object) -> None:
    """Have `check(ids_N)` called for ids whose rows were read. memory: what holds the rows, as long as it
    exists. check: raises UserError when the rows are damaged."""
    _CHECKS[rows_VD.data_ptr()] = check
    # another tensor may get the same address later
    weakref.finalize(memory, _CHECKS.pop, rows_VD.data_ptr())


def check_read(address: int, ids_N: Tensor) -> None:
    """Check the rows of ids_N (on the CPU) that a kernel read of the table at this address. Raises UserError
    when some are damaged."""
    if address in _CHECKS:
        _CHECKS[address](ids_N)


def check_all(rows_VD: Tensor) -> None:
    """Check all rows of a table, whose memory is about to be read. Raises UserError when some are damaged."""
    if _CHECKS and (check := _CHECKS.get(rows_VD.data_ptr())):
        for first in range(0, len(rows_VD), _CHECKED_AT_ONCE):
            check(torch.arange(first, min(first + _CHECKED_AT_ONCE, len(rows_VD))))


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of looked-up rows, gradients and states of rows stored as `dtype`."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _rows_address(weight_VD: Tensor) -> tuple[int, int, int]:
    """Return (address, rows, width) of a table's rows."""
    if weight_VD.dim() != 2 or weight_VD.dtype not in STORED or not 1 <= weight_VD.shape[1] <= MAX_DIM:
        raise TypeError(
            f"a table of shape {tuple(weight_VD.shape)} of {weight_VD.dtype}; give (rows, 1 to {MAX_DIM}) of "
            "float32, float64 or bfloat16"
        )
    return address(weight_VD, "table", weight_VD.dtype, weight_VD.shape), *weight_VD.shape


def look_up(
    weight_VD: Tensor, ids: Tensor, out_XD: Tensor | None = None, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (rows of `ids`, flat_N: a copy of the ids).

    out_XD: where the rows go; bfloat16 as float32. threads: at most; None: torch's number where that pays.
    Raises IndexError with the place (`args[0]`) of the first id of `ids` (int64) that is not a row.
    """
    rows, num_rows, dim = _rows_address(weight_VD)
    real, ids, count = real_dtype(weight_VD.dtype), ids.contiguous(), ids.numel()
    if out_XD is None:
        out_XD = torch.empty((*ids.shape, dim), dtype=real, device=CPU)
    flat_N = torch.empty(count, dtype=torch.int64, device=CPU)
    call = kernels.Lookup(
        team(count, dim * weight_VD.element_size(), threads), address(ids, "ids", torch.int64, ids.shape),
        count, rows, num_rows, dim, STORED[weight_VD.dtype],
        address(out_XD, "looked-up rows", real, (*ids.shape, dim)), flat_N.data_ptr(),
    )  # fmt: skip
    if not kernels.call("look_up", call):
        raise IndexError(call.wrong)
    check_read(rows, flat_N)
    return out_XD, flat_N


def flatten(ids_BF: Tensor, starts_F: Tensor, num_rows_F: Tensor) -> Tensor:
    """Return ids (..., F), a table each, as rows of all tables in order. Raises IndexError for a wrong id."""
    ids_BF, (columns,) = ids_BF.contiguous(), starts_F.shape
    flat_BF = torch.empty_like(ids_BF)
    call = kernels.Columns(
        address(ids_BF, "ids", torch.int64, (*ids_BF.shape[:-1], columns)),
        *(address(each_F, "columns", torch.int64, (columns,)) for each_F in (starts_F, num_rows_F)),
        ids_BF.numel(), columns, flat_BF.data_ptr(),
    )  # fmt: skip
    if not kernels.call("flatten", call):
        raise IndexError
    return flat_BF


def gather(weight_VD: Tensor, threads: int | None, ids_N: Tensor, out_ND: Tensor) -> None:
    """Copy rows as `look_up` does. Raises UserError, with out_ND untouched, when an id is not a row."""
    try:
        look_up(weight_VD, ids_N, out_ND, threads)
    except IndexError:
        raise UserError("a table became smaller while its rows were read") from None


def fill_normal(rows_VD: Tensor, std: float, seed: int, first: int = 0) -> None:
    """Fill a table, or its rows from `first` on, from normal(0, std) with as many threads as torch uses.

    A value depends on (seed, row, column) alone, so that a table that has grown starts with the rows of the
    smaller one.
    """
    if not (rows_VD.device.type == "cpu" and rows_VD.is_contiguous()):
        drawn_VD = torch.empty(rows_VD.shape, dtype=rows_VD.dtype, device=CPU)
        fill_normal(drawn_VD, std, seed, first)
        rows_VD.copy_(drawn_VD)
        return
    start = int.from_bytes(hashlib.sha256(b"%d" % seed).digest()[:8], "little")
    rows, count = address(rows_VD.detach(), "rows", rows_VD.dtype, rows_VD.shape), rows_VD.numel()
    place, stored = first * rows_VD.shape[1], STORED[rows_VD.dtype]
    call = kernels.Draw(team(count, rows_VD.element_size()), rows, count, place, stored, start, std)
    if not kernels.call("draw_normal", call):
        raise TypeError(f"fill_normal: first={first}")


_PLACES = torch.empty((0, 1), dtype=torch.uint8)
"""Instead of gradients: their numbers are wanted, not their addresses."""


class Segment(NamedTuple):
    """Ids (int64) of one table; the gradient of id n is row n of rows_ND. first_key: rows of all tables
    before."""

    ids_N: Tensor
    rows_ND: Tensor
    num_rows: int
    first_key: int = 0


class _Arranged(NamedTuple):
    """What the kernel sorts and fills: unique keys of several tables' ids, ascending, and where each one's
    gradients lie, in their order.

    A key is the row's number in its table plus the rows of all tables before. memory: keys, bounds and
    places. held: what addresses point to.
    """

    call: c.Structure
    memory: Tensor
    inverse_N: Tensor | None
    held: object

    @property
    def keys_U(self) -> Tensor:
        """The keys."""
        return self.memory[: self.call.num_unique]


def _gradients(rows_ND: Tensor, count: int) -> tuple[int | None, int]:
    """Return (address, bytes from row to row)."""
    if rows_ND is _PLACES:
        return None, 1
    gaps = rows_ND.numel() > 0 and rows_ND.shape[-1] > 1 and rows_ND.stride(-1) != 1
    if not is_plain(rows_ND) or rows_ND.dim() != 2 or len(rows_ND) != count or gaps:
        raise TypeError(
            f"gradients of shape {tuple(rows_ND.shape)}, strides {rows_ND.stride()}, of {count} ids"
        )
    return rows_ND.data_ptr(), rows_ND.stride(0) * rows_ND.element_size()


def _to_arrange(
    segments: Sequence[Segment], num_keys: int, frozen: Sequence[int] = (), *, inverse: bool = False
) -> _Arranged:
    """Return what sorts the ids of segments, stably, with memory for the results. frozen: ascending keys to
    leave out."""
    lines, held, count = (kernels.Segment * len(segments))(), [], 0
    for line, (ids, rows_ND, num_rows, first_key) in zip(lines, segments, strict=True):
        ids_N = ids.contiguous()
        own = ids_N.shape[0]
        line.ids, line.count = address(ids_N, "ids", torch.int64, (own,)), own
        line.first_key, line.num_rows = first_key, num_rows
        line.rows, line.row_bytes = _gradients(rows_ND, own)
        held.append((ids_N, rows_ND))
        count += own
    # one lookup in order: places follow from the place of an id, and need no list before the sort
    direct = len(segments) == 1
    # keys, bounds, places; scratch: two words an id, and the unsorted places where they are needed
    memory = torch.empty((5 if direct else 6) * count, dtype=torch.int64, device=CPU)
    keys = memory.data_ptr()
    bounds, places, words, unsorted = (keys + n * 8 * count for n in (1, 2, 3, 5))
    inverse_N = torch.empty(count, dtype=torch.int32, device=CPU) if inverse else None
    frozen_F = torch.tensor(frozen, dtype=torch.int64, device=CPU) if frozen else None
    call = kernels.Arrange(
        c.addressof(lines), len(segments), count, num_keys, None if frozen_F is None else frozen_F.data_ptr(),
        len(frozen), words, None if direct else unsorted, keys, bounds, places,
        None if inverse_N is None else inverse_N.data_ptr(),
    )  # fmt: skip
    return _Arranged(call, memory, inverse_N, (lines, held, frozen_F))


def _refused(arranged: _Arranged, segments: Sequence[Segment]) -> Exception:
    call = arranged.call
    if call.wrong_segment < 0:
        return UserError(
            f"{call.count:,} ids of {call.num_keys:,} rows at once: their numbers do not fit into 64 bits; "
            "use smaller batches"
        )
    wrong = segments[call.wrong_segment].ids_N[call.wrong_place]
    return IndexError(f"the gradient of row {int(wrong)}, which its table lacks")


def _arrange(
    segments: Sequence[Segment], num_keys: int, frozen: Sequence[int] = (), *, inverse: bool = False
) -> _Arranged:
    """Sort now; see `_to_arrange`."""
    arranged = _to_arrange(segments, num_keys, frozen, inverse=inverse)
    if not kernels.call("arrange", arranged.call):
        raise _refused(arranged, segments)
    return arranged


def occurrences(ids_N: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (unique_U, inverse_N, bounds_U2, places_N): the unique ids (int64), ascending; the place of each
    id among them (int32); from where to where in places_N each one's occurrences are (int32); and these, as
    places in ids_N (int64)."""
    arranged = _arrange([Segment(ids_N, _PLACES, num_rows)], num_rows, inverse=True)
    assert arranged.inverse_N is not None
    count, unique = len(ids_N), arranged.call.num_unique
    bounds_U2 = arranged.memory[count : count + unique].view(torch.int32).view(unique, 2)
    return arranged.keys_U, arranged.inverse_N, bounds_U2, arranged.memory[2 * count : 3 * count]


def sum_rows(
    segments: Sequence[Segment], frozen: Sequence[int] = (), *, gap: int = 0, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (keys_U, sums_UD, squares_U): unique ids of segments of one table, ascending, and the sums of
    their rows, in order. frozen: ids, ascending, to leave out. gap: values between one sum and the next.
    squares: of each sum's 2-norm (float64); else squares_U is empty.

    Raises UserError when keys and places do not fit into 64 bits, IndexError for an id that is not a row.
    """
    first = segments[0].rows_ND
    arranged = _arrange(segments, segments[0].num_rows, frozen)
    keys_U, dim, dtype = arranged.keys_U, first.shape[1], first.dtype
    count = len(keys_U)
    out_UX = torch.empty((count, dim + gap), dtype=dtype, device=CPU)
    squares_U = torch.empty(count if squares else 0, dtype=torch.float64, device=CPU)
    call = kernels.Sums(
        team(count, dim * out_UX.element_size()), c.addressof(arranged.call), dim, STORED[dtype],
        out_UX.data_ptr(), dim + gap, squares_U.data_ptr() if squares else None,
    )  # fmt: skip
    if count and not kernels.call("sum_rows", call):
        raise TypeError(f"rows of {dim} values of {dtype}; use 1 to {MAX_DIM} of float32 or float64")
    return keys_U, out_UX[:, :dim] if gap else out_UX, squares_U


# not a dataclass: each table's is made and compared in every step, which takes one nearly twice as long
class Rule(NamedTuple):
    """How a touched row changes. number: of `enum rule` in rows.c."""

    number: int
    lr: float
    decay: float
    eps: float
    betas: tuple[float, float]


@lru_cache(maxsize=8)
def corrections(beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Return 1 / (1 - beta1 ** k) and 1 / sqrt(1 - beta2 ** k) for k = 0, 1, ... up to where both are 1 in
    float64: looked up, as computing them for every row takes longer. Raises UserError for a beta that has no
    such step."""
    if not (0 <= beta1 <= _LARGEST_BETA and 0 <= beta2 <= _LARGEST_BETA):
        raise UserError(f"row optimizer: betas={beta1, beta2}; give values from 0 to {_LARGEST_BETA}")
    largest = max(beta1, beta2)
    last = 1 if largest == 0 else math.ceil(-60 * math.log(2) / math.log(largest)) + 1
    steps = torch.arange(last + 1, dtype=torch.float64, device=CPU)
    first, second = (-torch.expm1(steps * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2))
    return first.reciprocal_(), second.rsqrt_()


class Tables:
    """Tables of one width and type, as the update reads them: (weight, {field: (state, shape, type)}).

    first_keys: the rows before each table, and of all.
    """

    def __init__(
        self,
        members: Sequence[tuple[Tensor, Mapping[str, tuple[Tensor, tuple[int, ...], torch.dtype]]]],
    ) -> None:
        self.dtype, self.dim = members[0][0].dtype, members[0][0].shape[1]
        self.lines = (kernels.Table * len(members))()
        self.first_keys = [0]
        for line, (weight, states) in zip(self.lines, members, strict=True):
            line.rows, rows, _ = _rows_address(weight)
            line.first_key, line.num_rows = self.first_keys[-1], rows
            self.first_keys.append(self.first_keys[-1] + rows)
            for name, (state, shape, dtype) in states.items():
                setattr(line, name, address(state, name, dtype, shape))


def update(rule: Rule, tables: Tables, segments: Sequence[Segment], frozen: Sequence[int]) -> Tensor:
    """Change the rows and states that segments have gradients of; return their keys (see
    `_Arranged`). frozen: ascending keys to leave out. Raises what `sum_rows` does."""
    arranged = _to_arrange(segments, tables.first_keys[-1], frozen)
    fix1, fix2 = corrections(*rule.betas)
    # threads by all ids, as the unique ones are counted within the call
    call = kernels.Update(
        team(arranged.call.count, tables.dim * tables.dtype.itemsize), c.addressof(arranged.call),
        c.addressof(tables.lines), len(tables.lines), rule.number, STORED[tables.dtype], tables.dim, rule.lr,
        rule.decay, rule.eps, *rule.betas, fix1.data_ptr(), fix2.data_ptr(), len(fix1) - 1,
    )  # fmt: skip
    if not kernels.call("update_rows", call):
        raise _refused(arranged, segments)
    return arranged.keys_U
