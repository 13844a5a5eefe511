"""Calls the C kernels of tables, bins and pairs through ctypes: the compiled library, its
structs, thread teams, and the only place where a tensor becomes an address. Needs only torch.

The caller of a kernel must check length and range of its arguments, and keep them alive during the call.
"""

import ctypes as c
import os
import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dphybrid.kernels.compile_rows import HERE, compile_library, levels, library_name
from dphybrid.util.compiling import is_transformed
from dphybrid.util.errors import UserError

STORED = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
"""Type of stored values -> its number in `enum stored` of rows.c."""

PUBLISHED = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3, torch.float8_e4m3fn: 4}
"""The same for published tables, which are only looked up."""
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e8m0fnu: 2}
"""Type of their scales -> its number in `enum scale`."""

# Bound once: `is_plain` runs a dozen times a step, and looking these names up takes longer than using them.
_PLAIN, _keys_of = frozenset((Tensor, nn.Parameter)), torch._C._dispatch_keys
_key = torch._C.DispatchKey
_INFERENCE = torch._C.DispatchKeySet(_key.CPU).add(_key.AutocastCPU)
_PLAIN_KEYS = frozenset(
    (_INFERENCE.raw_repr(), _INFERENCE.add(_key.ADInplaceOrView).add(_key.AutogradCPU).raw_repr())
)
"""Dispatch keys of a dense tensor in host memory, made in inference mode or outside of it."""

_ONE_THREAD_BYTES = 2**18
"""Bytes of rows below which one thread is as fast as a team."""
_forked = False
_OPENMP_NAMES = ("libgomp", "libiomp", "libomp")
"""How the file names of OpenMP libraries begin, of which torch loads one."""

_TYPES = {"int64_t": c.c_int64, "uint64_t": c.c_uint64, "uint32_t": c.c_uint32, "double": c.c_double}


def _structs(*names: str) -> list[type[c.Structure]]:
    """Return ctypes classes for these structs of rows.c, parsed from its text."""
    # Parsed, not declared a second time in Python: if two declarations differed, a kernel would access memory
    # beyond the smaller one.
    text = re.sub(r"/\*.*?\*/", "", (HERE / "rows.c").read_text(encoding="utf-8"), flags=re.DOTALL)
    made: dict[str, type[c.Structure]] = {}
    for name in names:
        struct = re.search(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL)
        assert struct, name
        fields: list[tuple[str, type]] = []
        for line in struct[1].split(";")[:-1]:
            kind, declared = line.replace("const ", "").replace("struct ", "").strip().split(" ", 1)
            for field in declared.replace(" ", "").split(","):
                value = c.c_void_p if field[0] == "*" else made[kind] if kind in made else _TYPES[kind]
                fields.append((field.lstrip("*"), value))
        made[name] = type(name, (c.Structure,), {"_fields_": fields})
    return list(made.values())


Team, Lookup, Segment, Arrange, Sums, Update, Bins, Pairs = _structs(
    *("team", "lookup", "segment", "arrange", "sums", "update", "bins", "pairs"),
)


RULE_NUMBERS = {
    name.replace("_", "-"): number
    for number, name in enumerate(
        re.findall(r"X\((\w+)\)", (HERE / "rules.h").read_text(encoding="utf-8").partition("EACH_RULE(X)")[2])
    )
}
"""Name of an update's rule, as in `row_rules.RULES` -> its number in `enum rule` of rows.c."""


def _level() -> str:
    # torch's capability, not the processor's, so that ATEN_CPU_CAPABILITY lowers torch and the kernels alike.
    level_of = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
    return level_of.get(torch.backends.cpu.get_cpu_capability(), levels()[0])


@cache
def library() -> c.CDLL:
    """Return the library for this processor. In a checkout that was never installed, compile it first."""
    file = Path(os.environ.get("DPHYBRID_ROWS_LIBRARY") or HERE / library_name(_level()))
    if not file.exists():
        try:
            compile_library(_level(), file.parent)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{file} is missing and cannot be compiled: {error}; install dphybrid") from error
    return c.CDLL(str(file))


def call(name: str, arguments: c.Structure) -> bool:
    """Call a kernel. Return False if it refused its arguments; it has then changed no table."""
    return bool(getattr(library(), name)(c.byref(arguments)))


def _use_one_thread() -> None:
    """Keep this process, just forked, to one thread: it has none of the pool's threads, and OpenMP would wait
    for them forever, in torch's own operations, too."""
    global _forked
    _forked = True
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_use_one_thread)


@cache
def _gomp_parallel() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP library that torch has loaded, or None."""
    # The kernels use torch's thread pool: a second one would compete with it for cores.
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    for file in sorted({line.split(maxsplit=5)[5] for line in maps if line.count("/")}):
        if Path(file).name.startswith(_OPENMP_NAMES) and hasattr(openmp := c.CDLL(file), "GOMP_parallel"):
            return c.cast(openmp.GOMP_parallel, c.c_void_p).value
    return None


def team(count: int, row_bytes: int, threads: int | None = None) -> c.Structure:
    """Return the thread team for `count` rows of `row_bytes`. threads: None for torch's number if there are
    enough bytes, else one."""
    if _forked:
        threads = 1
    elif threads is None:
        # The order of sums does not depend on the team, so any number of threads gives the same bits.
        threads = torch.get_num_threads() if count * row_bytes >= _ONE_THREAD_BYTES else 1
    return Team(_gomp_parallel() if threads > 1 else None, threads)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's values are in host memory, as its strides say: no sparse, nested, meta, fake,
    functorch, negated or zero tensor, and none on a GPU."""
    # Checked before every data_ptr(): for a fake tensor that is not an address, and reading there would crash
    # the process. By dispatch keys, as torch itself decides whose operation runs.
    return type(tensor) in _PLAIN and _keys_of(tensor).raw_repr() in _PLAIN_KEYS


def may_read(*tensors: Tensor) -> bool:
    """Return whether a kernel may read these tensors here: all are plain, and no compiler, export, trace or
    dispatch mode looks on, which would miss what the kernel does. A mode with `allows_kernels` does not mind.
    """
    if torch.compiler.is_compiling():  # first, as compilers cannot follow the other questions
        return False
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    watched = not all(hasattr(mode, "allows_kernels") for mode in modes)
    return not watched and torch._C._get_tracing_state() is None and all(map(is_plain, tensors))


def may_train(*tensors: Tensor) -> bool:
    """Return whether a kernel may compute, from these tensors, what torch's operations would: in the step of
    a training, which records a gradient, in float32. Autocast, forward derivatives and transforms of
    torch.func need torch's operations.

    Elsewhere torch's operations compute: predictions are then one program with the same bits.
    """
    return (
        may_read(*tensors)
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and all(tensor.dtype is torch.float32 for tensor in tensors)
        and not is_transformed()
        and not torch._C._is_any_autocast_enabled()
    )


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor stands for a batch of tensors inside of vmap."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def address(tensor: Tensor, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the address of a contiguous tensor. Raises TypeError, which calls it `what`, for another type,
    shape or kind of tensor."""
    if not is_plain(tensor):
        raise TypeError(f"{what}: a {type(tensor).__name__} on {tensor.device} has no memory on the host")
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise TypeError(
            f"{what}: {tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}; expected "
            f"contiguous {tuple(shape)} of {dtype}"
        )
    return tensor.data_ptr()
