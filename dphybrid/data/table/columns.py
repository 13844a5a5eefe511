"""Columns of numbers on disk, one file a column, while a table is prepared: memory does not grow with it."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from dphybrid.data.batches import Array

BLOCK_ROWS = 2**16
"""Rows of a block, the piece that is encoded at a time."""


class ColumnStore:
    """One file of numbers a column, (B,) or (B, L), written chunk by chunk within `with`, then read in blocks
    by any number of threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[IO[bytes], np.dtype[Any], tuple[int, ...]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "ColumnStore":
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, name: str, values_B: Array) -> None:
        if name not in self._files:
            file = self._stack.enter_context((self.folder / str(len(self._files))).open("wb"))
            self._files[name] = (file, values_B.dtype, values_B.shape[1:])
        self._files[name][0].write(np.ascontiguousarray(values_B).data)

    def block(self, name: str, number: int, size: int = BLOCK_ROWS) -> Array:
        """Return rows from `number * size` on, `size` of them at most."""
        file, dtype, shape = self._files[name]
        width = math.prod(shape)
        values = np.fromfile(file.name, dtype, size * width, offset=number * size * width * dtype.itemsize)
        return values.reshape(-1, *shape)

    def with_rows(self, name: str, rows_B: Array) -> Iterator[tuple[Array, Array]]:
        """Yield blocks with their part of `rows_B`."""
        for number, start in enumerate(range(0, len(rows_B), 2**20)):
            yield self.block(name, number, 2**20), rows_B[start : start + 2**20]

    def whole(self, name: str) -> Array:
        file, dtype, shape = self._files[name]
        return np.fromfile(file.name, dtype).reshape(-1, *shape)
