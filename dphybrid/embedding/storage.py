"""Storage of a table's rows: in memory, or in a file that is mapped into memory."""

import math
import mmap
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dphybrid.embedding import native
from dphybrid.util.errors import UserError
from dphybrid.util.files import sync, temporary

GIB = 2**30
_KEEP_FREE_SHARE = 0.02
"""Share of the free memory or disk that tables must leave for everything else."""

_HUGE_PAGE_BYTES = 2**21


def available_memory_bytes() -> int:
    """Return how much memory this process can still get: the machine's available memory, or less if a cgroup
    sets a limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        import psutil

        return int(psutil.virtual_memory().available)
    kib = next(line for line in lines if line.startswith("MemAvailable:")).split()[1]
    pages = int(kib) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return pages
    # In a container, the kernel kills a process that exceeds the limit, however much memory the machine has.
    return pages if limit == "max" else max(0, min(pages, int(limit) - used))


def zero_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros, in huge pages if the system has them, so that access to random rows of a large table
    misses the TLB less often.

    A page takes memory only once it is written.
    """
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if size < 2 * _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    # Private, as shared anonymous memory gets no huge pages.
    pages = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages: small ones work, only slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


def _check_fits(num_bytes: int, what: str, folder: Path | None) -> None:
    """Raise UserError, with the numbers, if `num_bytes` do not fit into memory or, given a folder, onto its
    disk. what: beginning of the message."""
    if folder is None:
        free, remedy = available_memory_bytes(), "use fewer or narrower rows, bfloat16, or storage mmap"
        place = f"{free / GIB:.3g} GiB of memory are free"
    else:
        free, remedy = shutil.disk_usage(folder).free, "choose another folder or a smaller table"
        place = f"{folder} has {free / GIB:.3g} GiB free"
    if num_bytes > free * (1 - _KEEP_FREE_SHARE):
        raise UserError(f"{what}, but {place}; {remedy}")


_NEW_ROWS: ContextVar[Literal["filled", "unfilled", "deferred"]] = ContextVar("new_rows", default="filled")
"""How tables get their rows. A context variable, as models build their tables themselves: a parameter would
have to pass through every model's constructor."""


@contextmanager
def _new_rows(kind: Literal["unfilled", "deferred"]) -> Iterator[None]:
    token = _NEW_ROWS.set(kind)
    try:
        yield
    finally:
        _NEW_ROWS.reset(token)


def deferred_rows() -> AbstractContextManager[None]:
    """Return a context in which new tables get neither memory nor start values. For tables whose `weight`
    will be replaced by rows of a file."""
    return _new_rows("deferred")


def unfilled_rows() -> AbstractContextManager[None]:
    """Return a context in which new tables hold zeros, which take no memory until written. For tables that
    are only inspected, or loaded at once.

    A table with a named file, which outlives the process, still gets its start values.
    """
    return _new_rows("unfilled")


@dataclass
class StartValues:
    """Describes a table's start values, so that any part of the rows can be drawn without the rest.

    std, seed: of the normal distribution. scales: (first, last, factor)s, applied in order to the rows from
    first to below last; factor 0 for rows that start as zeros.
    """

    std: float
    seed: int
    scales: list[tuple[int, int, float]] = field(default_factory=list)

    def write(self, rows_VD: Tensor, first: int) -> None:
        """Fill rows_VD with the table's rows from `first` on, with the same bits as in the whole table."""
        native.fill_normal(rows_VD, self.std, self.seed, first)
        for begin, end, factor in self.scales:
            part = rows_VD[max(begin - first, 0) : max(end - first, 0)]
            # In place: there may not be enough memory for a copy of a large table's rows.
            part.mul_(factor) if factor else part.zero_()


def open_rows(
    shape: tuple[int, int],
    dtype: torch.dtype,
    storage: str,
    path: Path | None,
    name: str,
    start: "StartValues",
) -> tuple[Tensor, bool]:
    """Return (the rows of a table, whether they have just been filled with start values).

    storage: "memory", or "mmap" for the file `path`, which is created if absent and opened unchanged if it
    fits. If `path` is a folder, an unnamed file in it, which ends with the process. Raises UserError, with
    the numbers, if the table does not fit or the file belongs to another table.
    """
    kind, size = _NEW_ROWS.get(), math.prod(shape) * dtype.itemsize
    if kind == "deferred":  # one value expanded to all: the shape without the memory
        return torch.zeros((), dtype=dtype, device="cpu").expand(shape), False
    if storage not in ("memory", "mmap"):
        raise UserError(f"table {name!r}: storage={storage!r}; use memory or mmap")
    if (path is None) != (storage == "memory"):
        raise UserError(
            f"table {name!r}: storage={storage!r} with path={path}; mmap needs the path of a file or folder, "
            "memory takes none"
        )
    what = f"table {name!r}: {shape[0]:,} rows x {shape[1]} of {dtype} are {size / GIB:.3g} GiB"
    if path is None or path.is_dir():
        _check_fits(size, what, path)
        rows_VD = _zeros(path, shape, dtype)
        if kind == "filled":
            start.write(rows_VD, 0)
        return rows_VD, kind == "filled"
    # Beside the file, a note of its shape and type: tables of different shapes may have equal sizes.
    layout, expected = path.with_name(f"{path.name}.layout"), f"{shape[0]} x {shape[1]} of {dtype}\n"
    if path.exists():
        found, has = layout.read_text(encoding="utf-8") if layout.exists() else expected, path.stat().st_size
        if (found, has) != (expected, size):
            raise UserError(
                f"{what}, but {path} holds {found.strip()} in {has / GIB:.3g} GiB; give another path, or "
                "delete the file if it is not needed"
            )
        return _map_file(path, shape, dtype), False
    _check_fits(size, what, path.parent)
    layout.write_text(expected, encoding="utf-8")
    # Under a temporary name until it is filled, so that a file with the final name is always complete.
    part = temporary(path)
    try:
        rows_VD = _map_file(part, shape, dtype)
        start.write(rows_VD, 0)
        sync(part)
        part.rename(path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)
    return rows_VD, True


def open_states(
    wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], path: Path | None, *, fresh: bool, name: str
) -> dict[str, Tensor]:
    """Return an optimizer's states of a table's rows by name, given their shapes and types. They are zeros,
    or the values in the files `PATH.STATE` beside the file of a table that existed before.

    path: the table's file, or the folder of unnamed files; None: memory. fresh: the table is new, so its
    states are too. name: the table's. Raises UserError, with the numbers, if they do not fit or a file
    belongs to another optimizer.
    """
    folder = path if path is None or path.is_dir() else path.parent
    sizes = {state: math.prod(shape) * dtype.itemsize for state, (shape, dtype) in wanted.items()}
    files = (
        {state: path.with_name(f"{path.name}.{state}") for state in wanted}
        if path is not None and path != folder
        else {}
    )
    if fresh:
        for file in files.values():  # states of an earlier table with this path
            file.unlink(missing_ok=True)
    missing = [state for state in wanted if state not in files or not files[state].exists()]
    size = sum(sizes[state] for state in missing)
    _check_fits(size, f"table {name!r}: the optimizer's states of its rows are {size / GIB:.3g} GiB", folder)
    states = {}
    for state, (shape, dtype) in wanted.items():
        if not files:
            states[state] = _zeros(folder, shape, dtype)
            continue
        file = files[state]
        if state not in missing and file.stat().st_size != sizes[state]:
            raise UserError(
                f"table {name!r}: {file} has {file.stat().st_size:,} bytes, but state {state} needs "
                f"{sizes[state]:,}; use the optimizer that wrote it, or delete the file"
            )
        states[state] = _map_file(file, shape, dtype)
    return states


def _map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Map a file as a tensor; writes go to the file. A smaller file is extended with zeros."""
    return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def _zeros(folder: Path | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in memory or, given a folder, in an unnamed file there, which disappears with the process
    however it ends."""
    if folder is None:
        return zero_rows(shape, dtype)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".rows-") as file:
        # Mapped before the name is deleted: the mapping keeps the file's contents until the process ends.
        return _map_file(Path(file.name), shape, dtype)
