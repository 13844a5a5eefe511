"""Storage of a table's rows: in memory, or in a file that is mapped into memory."""

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dphybrid.util.errors import UserError

GIB = 2**30
_KEEP_FREE_SHARE = 0.02
"""Share of the free memory or disk that tables must leave for everything else."""

_HUGE_PAGE_BYTES = 2**21

_DRAWN_ROWS = 2**14
"""Rows whose initial values one generator draws."""


def available_memory_bytes() -> int:
    """Return how much memory this process can still get: the machine's available memory, or less if a cgroup
    sets a limit."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = next(line for line in lines if line.startswith("MemAvailable:")).split()[1]
    pages = int(kib) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        parts = dict(
            line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines()
        )
    except OSError:
        return pages
    # The kernel takes the page cache back before it kills.
    used -= sum(int(parts.get(name, 0)) for name in ("active_file", "inactive_file"))
    # In a container, the kernel kills a process that exceeds the limit, however much memory the machine has.
    return pages if limit == "max" else max(0, min(pages, int(limit) - used))


def zero_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros, in huge pages if the system has them, so that access to random rows of a large table
    misses the TLB less often. A page takes memory only once it is written."""
    size = math.prod(shape) * dtype.itemsize
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
        free = available_memory_bytes()
        remedy = "use fewer or narrower rows, bfloat16, or files (path=FOLDER, DPHYBRID_TABLE_STORAGE=mmap)"
        room = f"{free / GIB:.3g} GiB of memory are free"
    else:
        free, remedy = shutil.disk_usage(folder).free, "choose another folder or a smaller table"
        room = f"{folder} has {free / GIB:.3g} GiB free"
    if num_bytes > free * (1 - _KEEP_FREE_SHARE):
        raise UserError(f"{what}, but {room}; {remedy}")


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


deferred_rows = partial(_new_rows, "deferred")
"""A context in which new tables get neither memory nor initial values. For tables whose `weight` will be
replaced by rows of a file."""

unfilled_rows = partial(_new_rows, "unfilled")
"""A context in which new tables hold zeros, which take no memory until written. For tables that are only
inspected, or loaded at once."""


@dataclass
class StartValues:
    """Describes a table's initial values, so that any part of the rows can be drawn without the rest.

    std, seed: of the normal distribution. padding: a row that starts as zeros.
    """

    std: float
    seed: int
    padding: int | None = None

    def write(self, rows_VD: Tensor, first: int) -> None:
        """Fill rows_VD with the table's rows from `first` on, with the same bits as in the whole table, by as
        many threads as torch uses. A larger table begins with the same rows as a smaller one."""
        starts = range(first - first % _DRAWN_ROWS, first + len(rows_VD), _DRAWN_ROWS)
        with ThreadPoolExecutor(
            torch.get_num_threads()
        ) as pool:  # numpy draws without the interpreter's lock
            for _ in pool.map(partial(self._draw, rows_VD, first), starts):
                pass
        if self.padding is not None and first <= self.padding < first + len(rows_VD):
            rows_VD[self.padding - first] = 0.0

    def _draw(self, rows_VD: Tensor, first: int, start: int) -> None:
        """Draw the rows from `start` on that one generator draws."""
        stop = min(start + _DRAWN_ROWS, first + len(rows_VD))
        # numpy's generator, which takes seeds of any length; torch's for the CPU uses 32 bits of a seed.
        generator = np.random.default_rng([self.seed % 2**64, start])
        kind = np.float64 if rows_VD.dtype == torch.float64 else np.float32
        drawn = generator.standard_normal((stop - start, rows_VD.shape[1]), kind)
        drawn *= kind(self.std)
        rows_VD[max(start - first, 0) : stop - first] = torch.from_numpy(drawn[max(first - start, 0) :])


def open_rows(
    shape: tuple[int, int], dtype: torch.dtype, folder: Path | None, name: str, start: StartValues
) -> Tensor:
    """Return the rows of a table, filled with initial values, in memory or, given a folder, in an unnamed
    file there. Raises UserError, with the numbers, if the table does not fit."""
    kind, size = _NEW_ROWS.get(), math.prod(shape) * dtype.itemsize
    if kind == "deferred":  # one value expanded to all: the shape without the memory
        return torch.zeros((), dtype=dtype, device="cpu").expand(shape)
    if folder is not None and not folder.is_dir():
        raise UserError(f"table {name!r}: path={folder} is not a folder; make it")
    _check_fits(
        size, f"table {name!r}: {shape[0]:,} rows x {shape[1]} of {dtype} are {size / GIB:.3g} GiB", folder
    )
    rows_VD = _zeros(folder, shape, dtype)
    if kind == "filled":
        start.write(rows_VD, 0)
    return rows_VD


def open_states(
    wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], folder: Path | None, name: str
) -> dict[str, Tensor]:
    """Return zero states of a table's rows by name, given their shapes and types, in memory or, given a
    folder, in unnamed files there. name: the table's. Raises UserError, with the numbers, if they do not
    fit."""
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in wanted.values())
    _check_fits(size, f"table {name!r}: {', '.join(wanted)} for its rows takes {size / GIB:.3g} GiB", folder)
    return {state: _zeros(folder, shape, dtype) for state, (shape, dtype) in wanted.items()}


def _zeros(folder: Path | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in memory or, given a folder, in an unnamed file there, which disappears with the process
    however it ends."""
    size = math.prod(shape) * dtype.itemsize
    if folder is None or size == 0:
        return zero_rows(shape, dtype)
    # The mapping keeps the file's contents after its name is deleted, until the process ends.
    with tempfile.TemporaryFile(dir=folder, prefix=".rows-") as file:
        file.truncate(size)
        try:  # or a full disk would kill the process at a write to the mapping
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise UserError(
                f"{folder}: {size / GIB:.3g} GiB for rows: {error.strerror}; choose another folder or a "
                "smaller table"
            ) from error
        return mapped_rows(file.fileno(), mmap.MAP_SHARED, shape, dtype)


def mapped_rows(
    handle: int, flags: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0
) -> Tensor:
    """Return rows in a file, mapped into memory. flags: mmap's; offset: bytes before the first row."""
    pages = mmap.mmap(handle, 0, flags=flags)
    pages.madvise(mmap.MADV_RANDOM)  # or each row would read 32 pages around it
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
