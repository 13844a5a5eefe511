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

from dphybrid.embedding.native import fill_normal
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
        raise UserError(f"{what} {num_bytes / GIB:.3g} GiB, {place}; {remedy}")


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


def open_rows(
    num_rows: int, dim: int, dtype: torch.dtype, storage: str, path: Path | None, name: str
) -> tuple[Tensor, bool]:
    """Return (weight of shape (num_rows, dim), whether it must still be filled).

    storage: "memory", or "mmap": the file `path`, made when absent, opened as it is when it has the right
    size; where `path` is a folder, a file without a name in it, gone with the process. Raises UserError, with
    the numbers, when the table would not fit or the file has another size.
    """
    fill = _NEW_ROWS.get() == "filled"
    if _NEW_ROWS.get() == "deferred":
        # one value, seen as all: the shape without the memory
        return torch.zeros((), dtype=dtype, device="cpu").expand(num_rows, dim), False
    size = num_rows * dim * dtype.itemsize
    shape = f"table {name!r}: {num_rows:,} rows x {dim} of {dtype} are"
    if storage == "memory":
        if path is not None:
            raise UserError(f"table {name!r}: a path, {path}, goes with storage mmap only")
        _check_fits(size, shape, None)
        return zero_rows((num_rows, dim), dtype), fill
    if storage != "mmap":
        raise UserError(f"table {name!r}: storage={storage!r}; use memory or mmap")
    if path is None:
        raise UserError(f"table {name!r}: storage mmap needs the path of a file or folder")
    if path.is_dir():
        _check_fits(size, shape, path)
        return _zero_file(path, (num_rows, dim), dtype), fill
    fresh = not path.exists()
    if fresh:
        _check_fits(size, shape, path.parent)
    elif path.stat().st_size != size:
        raise UserError(
            f"{shape} {size / GIB:.3g} GiB, the file {path} has {path.stat().st_size / GIB:.3g} GiB; was it "
            "made for another table?"
        )
    layout, told = path.with_name(f"{path.name}.layout"), f"{num_rows} x {dim} of {dtype}\n"
    if fresh:
        layout.write_text(told, encoding="utf-8")
    elif layout.exists() and (found := layout.read_text(encoding="utf-8")) != told:
        raise UserError(f"{shape} wanted, {path} holds {found.strip()}; was it made for another table?")
    return _map_file(temporary(path) if fresh else path, (num_rows, dim), dtype), fresh


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
    _check_fits(
        sum(sizes[state] for state in missing),
        f"table {name!r}: the optimizer's states of its rows are",
        folder,
    )
    states = {}
    for state, (shape, dtype) in wanted.items():
        if not files:
            states[state] = zero_rows(shape, dtype) if folder is None else _zero_file(folder, shape, dtype)
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


def _zero_file(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in a file without a name: gone with the process, however that ends."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".rows-") as file:
        # mapped before the name goes: the mapping keeps the file until the process ends
        return _map_file(Path(file.name), shape, dtype)


@contextmanager
def finished_file(path: Path) -> Iterator[None]:
    """Give the file that the block fills its final name, by which it is complete, or remove it when the block
    is left early."""
    try:
        yield
        sync(temporary(path))
        temporary(path).rename(path)
        sync(path.parent)
    finally:
        temporary(path).unlink(missing_ok=True)


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
        fill_normal(rows_VD, self.std, self.seed, first)
        for begin, end, factor in self.scales:
            part = rows_VD[max(begin - first, 0) : max(end - first, 0)]
            part.copy_(part * factor if factor else torch.zeros_like(part))
