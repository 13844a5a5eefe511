"""Rows that are spread over ranks, which rank 0 reads and writes in slices: no process ever holds all rows.

Rank 0 works with stand-ins for whole tensors, for example to write them to a file slice by slice; meanwhile
the other ranks `serve`. Rank 0 broadcasts every command to all ranks, so that none waits longer than one
slice takes: the time limit holds for a table of any size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from dphybrid.cluster.ranks import Ranks
from dphybrid.training.finite import first_bad


class _Op(IntEnum):
    """Commands of rank 0 to the ranks that serve."""

    END = 0
    READ = 1
    WRITE = 2
    CHECK = 3
    PUT = 4


class Spread:
    """A table's rows and their states, spread over all ranks.

    pieces: this rank's contiguous part of each tensor. bounds: for each rank, its first row and the one after
    its last, in the order of rows.
    """

    def __init__(self, ranks: Ranks, pieces: Sequence[Tensor], bounds: Sequence[tuple[int, int]]) -> None:
        self._ranks, self._pieces, self.bounds = ranks, list(pieces), list(bounds)
        self.num_rows = max(stop for _, stop in bounds)

    def tensors(self) -> list["_SpreadTensor"]:
        """Return a stand-in for each whole tensor, for use on rank 0."""
        return [
            _SpreadTensor(self, number, (self.num_rows, *piece.shape[1:]), piece.dtype)
            for number, piece in enumerate(self._pieces)
        ]

    @contextmanager
    def served(self) -> Iterator[None]:
        """On rank 0: during the block, the other ranks must be in `serve`. They leave it when the block ends,
        also by an exception."""
        try:
            yield
        finally:
            self._command(_Op.END)

    def serve(self) -> None:
        """On the other ranks: send and receive slices as rank 0 commands, until its `served` block ends."""
        while True:
            op, number, owner, first, stop = self._command()
            if op == _Op.END:
                return
            if op == _Op.CHECK:
                self._ranks.all_gather(self._bad(number))
            elif op == _Op.PUT and owner == self._ranks.rank:  # `first` is the number of rows here
                ids_U = torch.empty(first, dtype=torch.int64)
                dist.recv(ids_U, 0)
                piece = self._pieces[number]
                rows = torch.empty((first, *piece.shape[1:]), dtype=piece.dtype)
                dist.recv(rows, 0)
                piece[ids_U.to(piece.device)] = rows.to(piece.device)
            elif owner == self._ranks.rank:
                part = self._pieces[number][first:stop]
                if op == _Op.READ:
                    dist.send(part.cpu().contiguous(), 0)
                else:
                    there = torch.empty(part.shape, dtype=part.dtype)
                    dist.recv(there, 0)
                    part.copy_(there)

    def read(self, number: int, start: int, stop: int) -> Tensor:
        """Return the rows from `start` to `stop` of whole tensor `number`."""
        piece = self._pieces[number]
        found = torch.empty((stop - start, *piece.shape[1:]), dtype=piece.dtype)
        for owner, first, last, offset in self._owners(start, stop):
            target = found[offset : offset + last - first]
            self._command(_Op.READ, number, owner, first, last)
            if owner == self._ranks.rank:
                target.copy_(piece[first:last])
            else:
                dist.recv(target, owner)
        return found

    def write(self, number: int, start: int, values: Tensor) -> None:
        """Write rows into whole tensor `number` from row `start` on."""
        for owner, first, last, offset in self._owners(start, start + len(values)):
            source = values[offset : offset + last - first]
            self._command(_Op.WRITE, number, owner, first, last)
            if owner == self._ranks.rank:
                self._pieces[number][first:last] = source
            else:
                dist.send(source.to(self._pieces[number].dtype).contiguous(), owner)

    def put(self, number: int, ids_U: Tensor, rows: Tensor) -> None:
        """Write rows into whole tensor `number` at the row numbers ids_U (ascending)."""
        piece = self._pieces[number]
        for owner, (first_row, last_row) in enumerate(self.bounds):
            low, high = torch.searchsorted(ids_U, torch.tensor([first_row, last_row])).tolist()
            if low == high:
                continue
            ids, part = ids_U[low:high] - first_row, rows[low:high].to(piece.dtype).contiguous()
            self._command(_Op.PUT, number, owner, high - low)
            if owner == self._ranks.rank:
                piece[ids.to(piece.device)] = part.to(piece.device)
            else:
                dist.send(ids, owner)
                dist.send(part, owner)

    def first_bad(self, number: int) -> tuple[int, float] | None:
        """Return row and value of the first entry of whole tensor `number` that is NaN or infinite, or None.
        Each rank checks its own rows."""
        self._command(_Op.CHECK, number)
        bad = [at for at in self._ranks.all_gather(self._bad(number)) if at is not None]
        return min(bad, default=None)

    def _bad(self, number: int) -> tuple[int, float] | None:
        at = first_bad(self._pieces[number])
        return None if at is None else (at[0] + self.bounds[self._ranks.rank][0], at[1])

    def _owners(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield for each rank that holds rows from `start` to `stop`: the rank, start and stop within its
        piece, and their offset from `start`."""
        for owner, (first_row, last_row) in enumerate(self.bounds):
            first, last = max(start, first_row), min(stop, last_row)
            if first < last:
                yield owner, first - first_row, last - first_row, first - start

    def _command(self, *command: int) -> list[int]:
        """Broadcast a command from rank 0; on the other ranks, without arguments, receive it."""
        # Always five numbers, because the receivers do not know the command yet.
        box = torch.tensor([*command, *[0] * (5 - len(command))])
        dist.broadcast(box, 0)
        return [int(value) for value in box]


class _SpreadTensor:
    """A stand-in for a tensor whose rows are spread over ranks, with the methods that `tensor_file` uses.

    Reading rows fetches them from their owners; assigning rows sends them to theirs. Only for rank 0, while
    the others serve.
    """

    def __init__(self, spread: Spread, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._spread, self._number = spread, number
        self.shape, self.dtype = torch.Size(shape), dtype

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(len(self))
        return self._spread.read(self._number, start, stop)

    def __setitem__(self, rows: slice, values: Tensor) -> None:
        self._spread.write(self._number, rows.indices(len(self))[0], values)

    def index_copy_(self, dim: int, ids_U: Tensor, rows: Tensor) -> None:
        assert dim == 0
        self._spread.put(self._number, ids_U, rows)

    def first_bad(self) -> tuple[int, float] | None:
        """Return row and value of the first entry that is NaN or infinite, or None."""
        return self._spread.first_bad(self._number)
