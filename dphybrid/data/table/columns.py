"""Columns of numbers on disk while a table is prepared: memory does not grow with it."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from dphybrid.data.batches import Array

BLOCK_ROWS = 2**16
"""Rows of a block at most, the piece that is encoded at a time."""


class ColumnStore:
    """Columns of numbers, (B,) or (B, L), in one file, so that their number does not matter: chunks of rows
    written within `with`, column after column, then read in blocks by any number of threads."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file: IO[bytes] | None = None
        self._columns: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        self._row_bytes = 0
        self._blocks: list[tuple[int, int, int, int]] = []
        self._end = 0

    def __enter__(self) -> "ColumnStore":
        self._file = self._path.open("wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, columns: Mapping[str, Array]) -> None:
        """Write a chunk of rows, which has the columns of the one before."""
        if not self._columns:
            for name, values in columns.items():
                self._columns[name] = (self._row_bytes, values.dtype, values.shape[1:])
                self._row_bytes += values.dtype.itemsize * math.prod(values.shape[1:])
        rows = len(next(iter(columns.values())))
        assert self._file is not None
        for name in self._columns:
            self._file.write(np.ascontiguousarray(columns[name]).data)
        parts = -(-rows // BLOCK_ROWS)
        bounds = [rows * part // parts for part in range(parts + 1)] if parts else []
        self._blocks += [(self._end, rows, start, stop) for start, stop in pairwise(bounds)]
        self._end += rows * self._row_bytes

    @property
    def lengths(self) -> list[int]:
        """Rows of each block."""
        return [stop - start for _, _, start, stop in self._blocks]

    def block(self, name: str, number: int) -> Array:
        """Return a block of a column."""
        at, rows, start, stop = self._blocks[number]
        before, dtype, shape = self._columns[name]
        size = math.prod(shape)
        values = np.fromfile(
            self._path,
            dtype,
            (stop - start) * size,
            offset=at + before * rows + start * size * dtype.itemsize,
        )
        return values.reshape(-1, *shape)

    def with_rows(self, name: str, rows_B: Array) -> Iterator[tuple[Array, Array]]:
        """Yield blocks with their part of `rows_B`."""
        start = 0
        for number, length in enumerate(self.lengths):
            yield self.block(name, number), rows_B[start : start + length]
            start += length

    def whole(self, name: str) -> Array:
        """Return a whole column."""
        return np.concatenate([self.block(name, number) for number in range(len(self._blocks))])
