"""Tables as they were at one moment, read slice by slice while updates go on.

Before an update, the old values of the rows that it will change are put aside, unless they have been read or
put aside already. So a snapshot takes memory only for rows that change while it is read, and an update waits
at most for the copy of one slice.

Letters: V rows of a table, N ids of an update, U unique ones.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from dphybrid.embedding.storage import zero_rows
from dphybrid.util.errors import UserError


class Snapshot:
    """The present values of tables' tensors. tables: name -> {key: tensor with one entry for each row}.

    room_bytes: for values put aside; when they take more, updates wait until the snapshot is closed.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Tensor]], room_bytes: float) -> None:
        self._tables = {name: _Table(tensors) for name, tensors in tables.items()}
        self._room_bytes = room_bytes
        self._lock, self._closed = threading.Lock(), threading.Event()

    def tensors(self, name: str) -> "dict[str, SnapshotTensor]":
        """Return a stand-in for each tensor of a table, to be read once, in the order of the keys."""
        table = self._tables[name]
        return {key: SnapshotTensor(table, key, self._lock) for key in table.tensors}

    @contextmanager
    def changing(self, ids: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the block change the rows `ids` (N,) of each table, by one write to each of its tensors."""
        with self._lock:
            for name, ids_N in ids.items():
                if name in self._tables:
                    self._tables[name].put_aside(ids_N.numpy())
            full = sum(table.bytes_aside for table in self._tables.values()) > self._room_bytes
            if not full:
                yield
                for name in self._tables.keys() & ids.keys():
                    self._tables[name].updates += 1
        if full:
            self._closed.wait()
            yield

    def close(self) -> None:
        """Stop putting values aside."""
        self._closed.set()

    def check(self) -> None:
        """Raise UserError if something other than an update has changed a table meanwhile."""
        with self._lock:
            for name, table in self._tables.items():
                changed = (t._version - table.updates != table.versions[k] for k, t in table.tensors.items())
                if any(changed):
                    raise UserError(
                        f"table {name!r}: was changed by something other than its optimizer while a "
                        "checkpoint was being written, which was not completed; continue with --resume (a "
                        "table that was changed so before is copied first), or change it in a callback"
                    )


class _Table:
    """A table in a snapshot. versions: of its tensors then. updates: how often it has been updated since."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.updates = dict(sorted(tensors.items())), 0
        self.versions = {key: tensor._version for key, tensor in self.tensors.items()}
        num_rows = len(next(iter(self.tensors.values())))
        # All of these take memory only where they are written.
        self._slot_V = zero_rows((num_rows,), torch.int32).numpy()  # slot among those put aside, from 1 on
        self._aside = {
            key: zero_rows(tuple(tensor.shape), tensor.dtype) for key, tensor in self.tensors.items()
        }
        self._count, self._rows_read = 0, dict.fromkeys(self.tensors, 0)

    @property
    def bytes_aside(self) -> int:
        return self._count * sum(tensor[:1].nbytes for tensor in self.tensors.values())

    def put_aside(self, ids_N: np.ndarray) -> None:
        # Tensors are read one after the other: a row is needed until the last one has been read there.
        ids_N = ids_N[(ids_N >= self._rows_read[list(self.tensors)[-1]]) & (ids_N < len(self._slot_V))]
        ids_N = ids_N[self._slot_V[ids_N] == 0]
        # Of repeated ids the last write stays, which takes a fifth of the time of np.unique's sort.
        order_N = np.arange(1, len(ids_N) + 1, dtype=np.int32)
        self._slot_V[ids_N] = order_N
        ids_U = ids_N[self._slot_V[ids_N] == order_N]
        stop = self._count + len(ids_U)
        self._slot_V[ids_U] = np.arange(self._count + 1, stop + 1)
        for key, tensor in self.tensors.items():
            torch.index_select(tensor, 0, torch.from_numpy(ids_U), out=self._aside[key][self._count : stop])
        self._count = stop

    def read(self, key: str, first: int, last: int) -> Tensor:
        """Return the rows from `first` to `last` of a tensor."""
        rows = self.tensors[key][first:last].clone()
        slot = torch.from_numpy(self._slot_V[first:last])
        old = slot.nonzero().flatten()
        rows[old] = self._aside[key][slot[old].long() - 1]
        self._rows_read[key] = last
        return rows


class SnapshotTensor:
    """Stands for a tensor of a table where slices of its rows are read."""

    def __init__(self, table: _Table, key: str, lock: threading.Lock) -> None:
        self._table, self._key, self._lock = table, key, lock
        tensor = table.tensors[key]
        self.dtype, self.shape, self.nbytes = tensor.dtype, tensor.shape, tensor.nbytes

    def __getitem__(self, rows: slice) -> Tensor:
        with self._lock:
            return self._table.read(self._key, rows.start, rows.stop)
