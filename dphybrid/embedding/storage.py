"""Where a table's rows lie: in memory, or in a file that is mapped into memory."""

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
"""Of the free memory or disk: left for everything else."""

_HUGE_PAGE_BYTES = 2**21


def available_memory_bytes() -> int:
    """Return what this process can still get: free memory of the machine, or less where a control group sets
    a limit."""
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
    # in a container the machine's free memory is not ours: beyond the limit the kernel kills the process
    return pages if limit == "max" else max(0, min(pages, int(limit) - used))


def zero_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in huge pages where the system has them: random rows of a large table then cost few
    address look-ups.

    Pages get memory when they are first written.
    """
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if size < 2 * _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    # Private: shared anonymous memory gets no huge pages.
    pages = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages: small ones are right, only slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


def _check_fits(num_bytes: int, what: str, folder: Path | None) -> None:
    """Raise UserError, with the numbers, when `num_bytes` do not fit into memory or, with a folder, on its
    disk. what: starts the message."""
    if folder is None:
        free, remedy = available_memory_bytes(), "use fewer or narrower rows, bfloat16, or storage mmap"
        place = f"{free / GIB:.3g} GiB of memory are free"
    else:
        free, remedy = shutil.disk_usage(folder).free, "choose another folder or a smaller table"
        place = f"{folder} has {free / GIB:.3g} GiB free"
    if num_bytes > free * (1 - _KEEP_FREE_SHARE):
        raise UserError(f"{what}, {place}; {remedy}")


_NEW_ROWS: ContextVar[Literal["filled", "unfilled", "deferred"]] = ContextVar("new_rows", default="filled")


@contextmanager
def _new_rows(kind: Literal["unfilled", "deferred"]) -> Iterator[None]:
    token = _NEW_ROWS.set(kind)
    try:
        yield
    finally:
        _NEW_ROWS.reset(token)


def deferred_rows() -> AbstractContextManager[None]:
    """Tables made within get neither memory nor start values, because their `weight` will be replaced by a
    file's."""
    return _new_rows("deferred")


def unfilled_rows() -> AbstractContextManager[None]:
    """Tables made within hold zeros, which take no memory before they are written: for tables that are only
    looked at, or loaded at once.

    A table with a file of its own, which outlives the process, gets its start values all the same.
    """
    return _new_rows("unfilled")


@dataclass
class StartValues:
    """What a table's rows start from, so that any part of them can be drawn without the rest.

    scales: factors on the rows first to below last, one after the other; 0 for rows that start as zeros.
    """

    std: float
    seed: int
    scales: list[tuple[int, int, float]] = field(default_factory=list)

    def write(self, rows_VD: Tensor, first: int) -> None:
        """Put the rows from `first` on into rows_VD, with the bits that they have in a whole table."""
        native.fill_normal(rows_VD, self.std, self.seed, first)
        for begin, end, factor in self.scales:
            part = rows_VD[max(begin - first, 0) : max(end - first, 0)]
            # in place: a copy of a large table's rows might not fit beside them
            part.mul_(factor) if factor else part.zero_()


def open_rows(
    shape: tuple[int, int],
    dtype: torch.dtype,
    storage: str,
    path: Path | None,
    name: str,
    start: "StartValues",
) -> tuple[Tensor, bool]:
    """Return (the rows of a table, whether they were filled with start values now).

    storage: "memory", or "mmap": the file `path`, made when absent, opened as it is when it has the right
    size; where `path` is a folder, a file without a name in it, gone with the process. Raises UserError, with
    the numbers, when the table would not fit or the file is another table's.
    """
    kind, size = _NEW_ROWS.get(), math.prod(shape) * dtype.itemsize
    if kind == "deferred":  # one value, seen as all: the shape without the memory
        return torch.zeros((), dtype=dtype, device="cpu").expand(shape), False
    if storage not in ("memory", "mmap"):
        raise UserError(f"table {name!r}: storage={storage!r}; use memory or mmap")
    if (path is None) != (storage == "memory"):
        raise UserError(
            f"table {name!r}: storage={storage!r} with path={path}; mmap needs the path of a file or folder, "
            "memory has none"
        )
    what = f"table {name!r}: {shape[0]:,} rows x {shape[1]} of {dtype} are {size / GIB:.3g} GiB"
    if path is None or path.is_dir():
        _check_fits(size, what, path)
        rows_VD = _zeros(path, shape, dtype)
        if kind == "filled":
            start.write(rows_VD, 0)
        return rows_VD, kind == "filled"
    layout, told = path.with_name(f"{path.name}.layout"), f"{shape[0]} x {shape[1]} of {dtype}\n"
    if path.exists():
        found, has = layout.read_text(encoding="utf-8") if layout.exists() else told, path.stat().st_size
        if (found, has) != (told, size):
            raise UserError(
                f"{what}, {path} holds {found.strip()} in {has / GIB:.3g} GiB; was it made for another table?"
            )
        return _map_file(path, shape, dtype), False
    _check_fits(size, what, path.parent)
    layout.write_text(told, encoding="utf-8")
    # under a temporary name until it is filled: a file with its name is one with all its rows
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
    """Return states of a table's rows by name, given their shapes and types: zeros, or what was in the files
    `PATH.STATE` beside a table's file that was opened as it is.

    path: the table's file, or the folder of files without a name; None: memory. fresh: the table is new, and
    so are its states. name: the table's. Raises UserError, with the numbers, when they would not fit or a
    file is another optimizer's.
    """
    folder = path if path is None or path.is_dir() else path.parent
    sizes = {state: math.prod(shape) * dtype.itemsize for state, (shape, dtype) in wanted.items()}
    files = (
        {state: path.with_name(f"{path.name}.{state}") for state in wanted}
        if path is not None and path != folder
        else {}
    )
    if fresh:
        for file in files.values():  # of an earlier table of this name: its moments are not this one's
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
                f"table {name!r}: {file} has another size than state {state}; was the optimizer another one?"
            )
        states[state] = _map_file(file, shape, dtype)
    return states


def _map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the values of a file, which grows with zeros to the size of `shape` where it is smaller; what is
    written goes to the file."""
    return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def _zeros(folder: Path | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in memory or, with a folder, in a file without a name there: gone with the process,
    however that ends."""
    if folder is None:
        return zero_rows(shape, dtype)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".rows-") as file:
        # mapped before the name goes: the mapping keeps the file until the process ends
        return _map_file(Path(file.name), shape, dtype)
