"""The C kernels of tables, dropout and bins: their compiled library, its structs, teams of threads, and the
only place where a tensor becomes an address. Needs torch alone.

Whoever calls a kernel checks length and range of what it hands over, and keeps it alive during the call.
"""

import ctypes as c
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dphybrid.kernels.compile_rows import compile_library, levels, library_name
from dphybrid.util.errors import UserError

STORED = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}

_ALONE_BYTES = 2**18
"""Below this many bytes of rows one thread is as fast as a team."""
_BORN_IN = os.getpid()
_OPENMP = ("libgomp", "libiomp", "libomp")

_I, _P, _F = c.c_int64, c.c_void_p, c.c_double


def _struct(name: str, **fields: type) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": list(fields.items())})


Team = _struct("Team", parallel=_P, threads=_I)
Lookup = _struct(
    "Lookup", team=Team, ids=_P, count=_I, rows=_P, num_rows=_I, dim=_I, stored=_I, out=_P, flat=_P,
    places=_P, num_places=_I, wrong=_I,
)  # fmt: skip
Segment = _struct(
    "Segment", ids=_P, count=_I, first_key=_I, num_rows=_I, rows=_P, row_bytes=_I, sources=_P, num_sources=_I
)
Arrange = _struct(
    "Arrange", segments=_P, num_segments=_I, count=_I, num_keys=_I, frozen=_P, num_frozen=_I, words=_P,
    unsorted=_P, keys=_P, bounds=_P, places=_P, inverse=_P, num_unique=_I, wrong_segment=_I, wrong_place=_I,
)  # fmt: skip
Sums = _struct(
    "Sums", team=Team, bounds=_P, count=_I, places=_P, num_places=_I, dim=_I, stored=_I,
    target=_P, target_step=_I, squares=_P,
)  # fmt: skip
Table = _struct(
    "Table", first_key=_I, num_rows=_I, rows=_P, mean=_P, square=_P, steps=_P, updates=_I, noise=c.c_uint64,
)  # fmt: skip
Update = _struct(
    "Update", team=Team, keys=_P, bounds=_P, count=_I, places=_P, num_places=_I, tables=_P, num_tables=_I,
    rule=_I, stored=_I, dim=_I, lr=_F, decay=_F, eps=_F, beta1=_F, beta2=_F, fix1=_P, fix2=_P, last_fix=_I,
)  # fmt: skip
Draw = _struct("Draw", team=Team, values=_P, count=_I, first=_I, stored=_I, seed=c.c_uint64, std=_F)
Columns = _struct("Columns", ids=_P, starts=_P, num_rows=_P, count=_I, num_columns=_I, flat=_P)
Dropout = _struct(
    "Dropout", team=Team, values=_P, out=_P, rows=_I, width=_I, first=_I, stored=_I, seed=c.c_uint64,
    dropped=c.c_uint32, scale=_F,
)  # fmt: skip
Bins = _struct(
    "Bins", team=Team, dense=_P, squashed=_P, inner=_P, left=_P, wide=_P, table=_P, itself=_P, out=_P,
    rows=_I, columns=_I, bins=_I, width=_I,
)  # fmt: skip
_STRUCTS = (Lookup, Segment, Arrange, Sums, Table, Update, Draw, Columns, Dropout, Bins)


def _level() -> str:
    # asked of torch, not of the processor: ATEN_CPU_CAPABILITY then lowers both alike
    known = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
    return known.get(torch.backends.cpu.get_cpu_capability(), levels()[0])


@cache
def library() -> c.CDLL:
    """Return the library for this processor; compile it first in a checkout that was never installed."""
    file = Path(os.environ.get("DPHYBRID_ROWS_LIBRARY") or Path(__file__).with_name(library_name(_level())))
    if not file.exists():
        try:
            compile_library(_level(), file.parent)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{file} is missing and cannot be compiled: {error}; install dphybrid") from error
    found = c.CDLL(str(file))
    found.size_of.argtypes, found.size_of.restype = [_I], _I
    # the structs are declared in C and here: two that differ would write past their ends
    if [found.size_of(n) for n in range(len(_STRUCTS))] != [c.sizeof(each) for each in _STRUCTS]:
        raise ImportError(f"{file} was compiled from another rows.c")
    of_blocks = ("drop_out", "embed")
    for name in ("look_up", "flatten", "arrange", "sum_rows", "update_rows", "draw_normal", *of_blocks):
        getattr(found, name).argtypes = [_P]
    return found


def call(name: str, arguments: c.Structure) -> bool:
    """Call a kernel; return False where it refused its arguments and wrote nothing."""
    return bool(getattr(library(), name)(c.addressof(arguments)))


@cache
def _parallel() -> int | None:
    """Return the address of GOMP_parallel in torch's OpenMP: no second pool competes for cores."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    for file in sorted({line.split(maxsplit=5)[5] for line in maps if line.count("/")}):
        if Path(file).name.startswith(_OPENMP) and hasattr(openmp := c.CDLL(file), "GOMP_parallel"):
            return c.cast(openmp.GOMP_parallel, _P).value
    return None


def team(count: int, row_bytes: int, threads: int | None = None) -> c.Structure:
    """Return as many threads as pay; one in a forked child, which has lost the team's."""
    if threads is None:
        # a sum's order never depends on the team, so any number of threads gives the same bits
        threads = torch.get_num_threads() if count * row_bytes >= _ALONE_BYTES else 1
    if os.getpid() != _BORN_IN:
        threads = 1
    return Team(_parallel() if threads > 1 else None, threads)


def is_plain(tensor: Tensor) -> bool:
    """Has the tensor readable memory on the host: is it not fake, meta, sparse, functorch's or on a GPU?"""
    # asked before any data_ptr(): that of a fake tensor is no address, and reading there ends the process
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and torch._C._has_storage(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def address(tensor: Tensor, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the address of a contiguous tensor. Raises TypeError for another type, shape or kind of tensor;
    what: names it."""
    if not is_plain(tensor):
        raise TypeError(f"{what}: a {type(tensor).__name__} on {tensor.device} has no memory on the host")
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise TypeError(
            f"{what}: {tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}; expected "
            f"contiguous {tuple(shape)} of {dtype}"
        )
    return tensor.data_ptr()
