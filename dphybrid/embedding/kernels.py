"""What the compiled kernels do, as functions of tensors. numba is imported, and a kernel compiled, when it is
first needed.

Letters: N ids of a lookup, U unique keys, B bags, D width of a row, V rows of a table.
"""

import ctypes
import hashlib
import importlib.util
import operator
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dphybrid.embedding.machine_code import folder_of, kernel_of
from dphybrid.embedding.sizes import AHEAD, DIGIT_BITS, DRAWN
from dphybrid.embedding.team import Kernel, run_kernel
from dphybrid.util.errors import UserError

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
RULES = {"sgd": 0, "adagrad": 1, "adam": 2, "lazy-adam": 3}

_ALONE_BYTES = 2**18
"""Below this many bytes of rows one thread is as fast as a team."""
_BLOCK_BYTES = 2**16


def use_threads(count: int) -> None:
    """Have torch, the row kernels and, unless the user said otherwise, numba's own parallel functions use
    `count` threads.

    The first call of such a function makes its number that of OpenMP, hence torch's: it must be the same.
    """
    torch.set_num_threads(count)
    if "numba" not in sys.modules:  # later it would refuse a change
        os.environ.setdefault("NUMBA_NUM_THREADS", str(count))


_MODULE = "dphybrid.embedding.compiled"


def kept_in() -> Path:
    """Return the folder of the kernels' machine code."""
    return folder_of(_MODULE)


@cache
def _kernel(name: str, *constants: int) -> Kernel:
    return kernel_of(_MODULE, name, *constants)


def warm_up(rule: str, dim: int, dtype: torch.dtype) -> None:
    """Make ready what lookups and updates of tables of this width and type will call. Without numba it does
    nothing."""
    if importlib.util.find_spec("numba") is None:
        return  # said when a table is used
    _kernel("draw", KINDS[dtype])
    _kernel("arrange")
    _kernel("gather", dim, KINDS[dtype])
    _kernel("update", RULES[rule], dim, KINDS[dtype])


_TABLE = 7
"""Numbers in the update kernel's page on one table."""
_Page = ctypes.c_int64 * 24


_Value = int | Tensor | ctypes.Array[ctypes.c_int64] | None


def _number(value: _Value) -> int:
    if isinstance(value, int):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else ctypes.addressof(value)


def _numbers(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * len(values))(*values)


@lru_cache(maxsize=64)
def _kept_numbers(*values: int) -> "ctypes.Array[ctypes.c_int64]":
    """Numbers that are the same in every step, and that nobody changes."""
    return _numbers(values)


def _call(kernel: Kernel, values: Sequence[_Value], threads: int = 1) -> "ctypes.Array[ctypes.c_int64]":
    """Run a kernel on a page of numbers and, for tensors and arrays, of their addresses; return the page."""
    page = _Page(0, *map(_number, values))
    run_kernel(kernel, ctypes.addressof(page), threads)
    return page


def _share(count: int, row_bytes: int, threads: int | None) -> tuple[int, int]:
    """Return (rows of a block, threads) for `count` rows."""
    if threads is None:
        threads = torch.get_num_threads() if count * row_bytes >= _ALONE_BYTES else 1
    return max(1, _BLOCK_BYTES // row_bytes), threads


def gather(
    weight_VD: Tensor,
    ids_N: Tensor,
    out_XD: Tensor,
    threads: int | None = None,
    *,
    places_N: Tensor | None = None,
) -> bool:
    """Copy the rows ids_N (int64) to out_XD, in order or to the rows places_N (int64), bfloat16 as float32;
    return False, with out_XD in parts, when an id is no row.

    threads: at most; None: torch's number where that pays.
    """
    return gather_columns([weight_VD], ids_N, out_XD, threads, places_N=places_N)


def gather_columns(
    weights_F: Sequence[Tensor],
    ids_BF: Tensor,
    out: Tensor,
    threads: int | None = None,
    *,
    places_N: Tensor | None = None,
) -> bool:
    """Like `gather`, of several tables of one width and type: the columns of ids_BF are of one table each."""
    count, weight = ids_BF.numel(), weights_F[0]
    if not count:
        return True
    dim = weight.shape[1]
    size, threads = _share(count, dim * weight.element_size(), threads)
    ids_BF = ids_BF.contiguous()
    tables = _kept_numbers(*[number for table in weights_F for number in (table.data_ptr(), table.size(0))])
    values: list[_Value] = [ids_BF, count, size, tables, len(weights_F), out, 0, places_N]
    return not _call(_kernel("gather", dim, KINDS[weight.dtype]), values, threads)[7]


def fill_normal(rows_VD: Tensor, std: float, seed: int, first: int = 0) -> None:
    """Fill a table, or its rows from `first` on, from normal(0, std) with as many threads as torch uses.

    A value depends on (seed, row, column) alone, so that a table that has grown starts with the rows of the
    smaller one.
    """
    in_place = rows_VD.device.type == "cpu" and rows_VD.is_contiguous()
    drawn_VD = rows_VD if in_place else torch.empty(rows_VD.shape, dtype=rows_VD.dtype)
    count, item, place = drawn_VD.numel(), drawn_VD.element_size(), first * drawn_VD.shape[1]
    size, threads = _share(count, item, None)
    start = int.from_bytes(hashlib.sha256(b"%d" % seed).digest()[:8], "little", signed=True)
    values: list[_Value] = [count, -(-size // DRAWN), drawn_VD, start, *_bits(std), place]
    _call(_kernel("draw", KINDS[drawn_VD.dtype]), values, threads)
    if not in_place:
        rows_VD.copy_(drawn_VD)


@dataclass
class Segment:
    """Ids whose gradients lie in the rows of one tensor: id n's in row n or, where there are `sources_N`, in
    row sources_N[n]."""

    ids_N: Tensor
    rows_XD: Tensor
    sources_N: Tensor | None = None


@dataclass
class Arranged:
    """Unique keys of several tables' ids, ascending, and where each one's gradients lie, in their order.

    A key is the row's number in its table plus the rows of all tables before. bounds_U2: from where to where
    in `places_N`, which holds addresses. held: what the addresses point to.
    """

    keys_U: Tensor
    bounds_U2: Tensor
    places_N: Tensor
    inverse_N: Tensor | None
    held: Any = field(repr=False)


def arrange(
    segments: Sequence[tuple[Segment, int]],
    num_keys: int,
    frozen: Sequence[int] = (),
    *,
    inverse: bool = False,
) -> Arranged:
    """Sort the ids of segments, each with its table's first key, stably. frozen: ascending keys to leave out.

    Raises UserError when keys and places do not fit into 64 bits.
    """
    count = sum([len(segment.ids_N) for segment, _ in segments])
    place_bits, key_bits = max(1, count.bit_length()), max(1, (num_keys - 1).bit_length())
    if place_bits + key_bits > 63 or count > 2**31 - 1:
        raise UserError(
            f"{count:,} ids of {num_keys:,} rows at once: their numbers do not fit into 64 bits; use "
            "smaller batches"
        )
    lines: list[int] = []
    held = []
    for segment, first_key in segments:
        ids_N, rows_XD, sources_N = segment.ids_N.contiguous(), segment.rows_XD, segment.sources_N
        held.append((ids_N, rows_XD, sources_N))
        row_bytes = rows_XD.stride(0) * rows_XD.element_size()
        lines += [ids_N.data_ptr(), len(ids_N), first_key, rows_XD.data_ptr(), row_bytes, _number(sources_N)]
    keys_U, bounds_U2 = torch.empty(count, dtype=torch.int64), torch.empty((count, 2), dtype=torch.int32)
    places_N = torch.empty(count + AHEAD, dtype=torch.int64)
    inverse_N = torch.empty(count, dtype=torch.int32) if inverse else None
    if not count:
        return Arranged(keys_U, bounds_U2, places_N, inverse_N, held)
    scratch = torch.empty(3 * count + (1 << DIGIT_BITS), dtype=torch.int64)
    first, part = scratch.data_ptr(), 8 * count
    second, third, counts = first + part, first + 2 * part, first + 3 * part
    values = (_numbers(lines), len(segments), count, place_bits, key_bits, first, second, counts, third)
    out = (0, keys_U, bounds_U2, places_N, inverse_N)
    unique = int(_call(_kernel("arrange"), (*values, _numbers(frozen), len(frozen), *out))[12])
    return Arranged(keys_U.resize_(unique), bounds_U2.resize_(unique, 2), places_N, inverse_N, held)


def sum_rows(arranged: Arranged, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (sums_UD, squares_U): of each key's rows, which are of `dtype`, and the square (float64) of each
    sum's 2-norm."""
    count = len(arranged.keys_U)
    sums_UD = torch.empty((count, dim), dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    squares_U = torch.empty(count, dtype=torch.float64)
    _sum(arranged.bounds_U2, arranged.places_N, dim, dtype, sums_UD, squares_U)
    return sums_UD, squares_U


def square_rows(arranged: Arranged, dim: int, dtype: torch.dtype) -> Tensor:
    """Return squares_U of `sum_rows` alone."""
    squares_U = torch.empty(len(arranged.keys_U), dtype=torch.float64)
    _sum(arranged.bounds_U2, arranged.places_N, dim, dtype, None, squares_U)
    return squares_U


def _sum(
    bounds_U2: Tensor,
    places_N: Tensor,
    dim: int,
    dtype: torch.dtype,
    out_UD: Tensor | None,
    squares_U: Tensor | None = None,
    rows_VD: Tensor | None = None,
) -> None:
    """rows_VD: whose rows the places are; None: they are addresses."""
    count = len(bounds_U2)
    if count:
        size, threads = _share(count, dim * (4 if dtype == torch.bfloat16 else dtype.itemsize), None)
        step = 1 if rows_VD is None else dim * dtype.itemsize
        page = (count, size, bounds_U2, places_N, out_UD, squares_U, len(places_N), rows_VD, step)
        _call(_kernel("sum", dim, KINDS[dtype]), page, threads)


def pool(weight_VD: Tensor, ids_N: Tensor, ends_B: Tensor) -> Tensor:
    """Return pooled_BD, the sums of bags of rows: bag b has the ids (int64, in range) from ends_B[b - 1] to
    before ends_B[b]."""
    dim = weight_VD.shape[1]
    pooled_BD = torch.empty(
        (len(ends_B), dim), dtype=torch.float32 if weight_VD.dtype == torch.bfloat16 else weight_VD.dtype
    )
    bounds_B2 = (
        torch.stack([torch.nn.functional.pad(ends_B[:-1], (1, 0)), ends_B], 1).int()
        if len(ends_B)
        else ends_B
    )
    _sum(bounds_B2, ids_N.contiguous(), dim, weight_VD.dtype, pooled_BD, rows_VD=weight_VD)
    return pooled_BD


@dataclass(frozen=True)
class Rule:
    """How a touched row changes. corrections: of Adam's two moments by step (float64); see `optim`."""

    name: str
    lr: float
    decay: float
    eps: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    corrections: tuple[Tensor, Tensor] | None = None


_NO_FIXES = torch.ones(1, dtype=torch.float64)


class Tables:
    """Tables of one width and type and their states, as the update kernel reads them. first_keys: each one's
    first key, those of all before it."""

    def __init__(
        self, first_keys: Sequence[int], weights: Sequence[Tensor], states: Sequence[Tensor]
    ) -> None:
        """states: all of the first table's, then of the next one."""
        self.tensors = [*weights, *states]
        self.dim, self.dtype, self._count = weights[0].shape[1], weights[0].dtype, len(weights)
        self.page, each = (ctypes.c_int64 * (_TABLE * self._count))(), len(states) // self._count
        for number, (first_key, weight) in enumerate(zip(first_keys, weights, strict=True)):
            own = states[each * number : each * (number + 1)]
            addresses = [first_key, weight.data_ptr(), *(state.data_ptr() for state in own)]
            self.page[_TABLE * number : _TABLE * number + len(addresses)] = [*addresses]
        self.factors = [0.0] * self._count

    def __len__(self) -> int:
        return self._count

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Are these (weights, then states) still the tables' tensors?"""
        return len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))

    def set_factors(self, factors: Sequence[float]) -> None:
        """Say what each table's gradients shall be multiplied by."""
        if [*factors] != self.factors:
            self.page[_TABLE - 1 :: _TABLE], self.factors = [*_bits(*factors)], [*factors]

    def set_noises(self, noises: Sequence[int]) -> None:
        """Say where the noise of each table's rounding starts."""
        self.page[_TABLE - 2 :: _TABLE] = [*noises]


def update(rule: Rule, arranged: Arranged, tables: Tables, keys_U: Tensor, bounds_U2: Tensor) -> None:
    """Change the rows and states of some of the arranged keys, with their bounds, or of all."""
    count, dim = len(keys_U), tables.dim
    if not count:
        return
    fixes = rule.corrections or (_NO_FIXES, _NO_FIXES)
    size, threads = _share(count, dim * tables.dtype.itemsize, None)
    values: list[_Value] = [count, size, keys_U, bounds_U2, arranged.places_N]
    values += [tables.page, len(tables), *_bits(rule.decay, rule.lr, rule.eps, *rule.betas)]
    values += [*fixes, len(fixes[0]) - 1]
    _call(_kernel("update", RULES[rule.name], dim, KINDS[tables.dtype]), values, threads)


def _bits(*numbers: float) -> tuple[int, ...]:
    """Return float64 numbers as the int64 numbers with the same bits."""
    return struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))
