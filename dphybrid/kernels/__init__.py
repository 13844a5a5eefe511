"""The C kernels of tables, dropout and bins: their compiled library, its structs, teams of threads, and the
only place where a tensor becomes an address. Needs torch alone.

Whoever calls a kernel checks length and range of what it hands over, and keeps it alive during the call.
"""

import ctypes as c
import os
import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dphybrid.kernels.compile_rows import HERE, compile_library, levels, library_name
from dphybrid.util.errors import UserError

STORED = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}

# bound once: a step asks `is_plain` a dozen times, and looks these up for longer than they take
_PLAIN, _STRIDED = frozenset((Tensor, nn.Parameter)), torch.strided
_has_storage, _is_functorch = torch._C._has_storage, torch._C._functorch.is_functorch_wrapped_tensor

_ALONE_BYTES = 2**18
"""Below this many bytes of rows one thread is as fast as a team."""
_BORN_IN = os.getpid()
_OPENMP = ("libgomp", "libiomp", "libomp")

_TYPES = {"int64_t": c.c_int64, "uint64_t": c.c_uint64, "uint32_t": c.c_uint32, "double": c.c_double}


def _structs(*names: str) -> list[type[c.Structure]]:
    """Return these structs of rows.c."""
    # read, not declared a second time: two declarations that differ would write past their ends
    text = re.sub(r"/\*.*?\*/", "", (HERE / "rows.c").read_text(encoding="utf-8"), flags=re.DOTALL)
    made: dict[str, type[c.Structure]] = {}
    for name in names:
        found = re.search(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL)
        assert found, name
        fields: list[tuple[str, type]] = []
        for line in found[1].split(";")[:-1]:
            kind, declared = line.replace("const ", "").replace("struct ", "").strip().split(" ", 1)
            for each in declared.replace(" ", "").split(","):
                value = c.c_void_p if each[0] == "*" else made[kind] if kind in made else _TYPES[kind]
                fields.append((each.lstrip("*"), value))
        made[name] = type(name, (c.Structure,), {"_fields_": fields})
    return list(made.values())


Team, Lookup, Columns, Segment, Arrange, Sums, Table, Update, Draw, Dropout, Bins = _structs(
    *("team", "lookup", "columns", "segment", "arrange", "sums", "table", "update", "draw", "dropout", "bins")
)


def _level() -> str:
    # asked of torch, not of the processor: ATEN_CPU_CAPABILITY then lowers both alike
    known = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
    return known.get(torch.backends.cpu.get_cpu_capability(), levels()[0])


@cache
def library() -> c.CDLL:
    """Return the library for this processor; compile it first in a checkout that was never installed."""
    file = Path(os.environ.get("DPHYBRID_ROWS_LIBRARY") or HERE / library_name(_level()))
    if not file.exists():
        try:
            compile_library(_level(), file.parent)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{file} is missing and cannot be compiled: {error}; install dphybrid") from error
    return c.CDLL(str(file))


def call(name: str, arguments: c.Structure) -> bool:
    """Call a kernel; return False where it refused its arguments and wrote nothing."""
    return bool(getattr(library(), name)(c.byref(arguments)))


@cache
def _parallel() -> int | None:
    """Return the address of GOMP_parallel in torch's OpenMP: no second pool competes for cores."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    for file in sorted({line.split(maxsplit=5)[5] for line in maps if line.count("/")}):
        if Path(file).name.startswith(_OPENMP) and hasattr(openmp := c.CDLL(file), "GOMP_parallel"):
            return c.cast(openmp.GOMP_parallel, c.c_void_p).value
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
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is _STRIDED
        and _has_storage(tensor)
        and not _is_functorch(tensor)
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
