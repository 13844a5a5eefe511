"""Sends rows from a table to the replicas of a region, and the rows' gradients back.

Letters: N ids of one replica's share, U unique ids among them, C rows changed meanwhile, D width of a row, V
rows of the table.

Each replica gets only the unique rows of its own share, straight from the table. They are gathered into a
pinned buffer and sent on a separate stream, together with the indices that expand them, while the devices
still compute the batch before. Rows that an update has changed since are sent again just before their use. On
the device, the rows are expanded to one row per id; in backward, gradients of repeated ids are summed there,
so that only one gradient per unique row comes back.

torch's caching host allocator reuses pinned buffers once the copies from or to them have ended.

The same code runs for virtual devices on the CPU, where buffers are plain memory and there are no streams or
events.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dphybrid.embedding import native
from dphybrid.embedding.lookup import Counters, Occurrences, not_differentiable, sort_ids, sum_by_row
from dphybrid.embedding.native import StoredRows

SizesOf = Callable[[int], Sequence[int]]
"""Function from the number of rows of a batch to the number of rows of each replica's share."""


class DeviceRows(torch.autograd.Function):
    """(rows_UD, *`Occurrences.indices`) -> rows_ND, on a replica's device. Backward sums the gradients of
    repeated ids there."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, inverse_N: Tensor, *occurrences: Tensor) -> Tensor:
        ctx.save_for_backward(*occurrences)
        # So backward gets None, not zeros, for rows that the loss does not use. Zeros would count as a
        # gradient: the row optimizer would touch these rows.
        ctx.set_materialize_grads(False)
        return rows_UD.index_select(0, inverse_N)

    @staticmethod
    def backward(ctx: Any, grads_ND: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads_ND is None:
            return None, None, None, None, None
        if grads_ND.requires_grad:
            raise not_differentiable()
        # Not index_add_: on a GPU its atomic adds come in any order. embedding_bag sums each bag in order, by
        # one thread, so the bits are the same every time.
        return sum_by_row(grads_ND.contiguous(), *ctx.saved_tensors), None, None, None, None


@dataclass
class Share:
    """One replica's part of a lookup, which `channel` is sending to the device.

    Attributes:
        where: Its unique ids and their occurrences, on the host.
        shape: Of its ids.
        rows_UD, indices: On the device; indices are `where.indices()`, views of one memory.
        ready: Event of their arrival (None on the CPU).
    """

    channel: "Channel"
    where: Occurrences
    shape: torch.Size
    rows_UD: Tensor
    indices: Sequence[Tensor]
    ready: "torch.cuda.Event | None"


class Channel:
    """Sends rows to one replica's device and receives their gradients. A worker thread may send; repairs and
    receiving run in the training thread."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self.device, self._counters = device, counters
        self._cuda = device.type == "cuda"
        self._to = torch.cuda.Stream(device) if self._cuda else None
        self._back = torch.cuda.Stream(device) if self._cuda else None

    def send(self, rows_VD: Tensor | StoredRows, ids: Tensor, threads: int | None) -> Share:
        """Start sending the unique rows of `ids`, which are rows of the table. threads: the most to use."""
        where = sort_ids(ids.reshape(-1), len(rows_VD))
        real, on_host = native.real_dtype(rows_VD.dtype), where.indices()
        rows_UD = self._buffer((len(where.unique_U), rows_VD.shape[1]), real)
        native.look_up(rows_VD, where.unique_U, rows_UD, threads)
        sizes = list(map(len, on_host))
        indices = torch.cat(on_host, out=self._buffer((sum(sizes),), torch.int32))
        rows_UD, indices, ready = self._start_copy(rows_UD, indices)
        return Share(self, where, ids.shape, rows_UD, indices.split(sizes), ready)

    def send_again(self, share: Share, positions_C: Tensor, rows_VD: Tensor | StoredRows) -> None:
        """Replace the rows at `positions_C` of a share that was sent already by the table's present ones."""
        rows_CD = self._buffer((len(positions_C), share.rows_UD.shape[1]), share.rows_UD.dtype)
        native.look_up(rows_VD, share.where.unique_U.index_select(0, positions_C), rows_CD)
        positions = self._buffer(positions_C.shape, positions_C.dtype).copy_(positions_C)
        rows_CD, positions, share.ready = self._start_copy(rows_CD, positions)
        with self._on(self._to):  # the stream of both copies, so this runs after them
            share.rows_UD.index_copy_(0, positions, rows_CD)
            if self._to is not None and share.ready is not None:
                share.ready.record(self._to)

    def wait_for(self, share: Share, counted: bool) -> None:
        """Make the device's current stream wait until the share has arrived. counted: add it to the
        counters."""
        if counted:
            self._counters.unique += len(share.where.unique_U)
        if share.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(share.ready)
            # The memory belongs to the copying stream. Without this, the allocator would reuse it before the
            # computing stream has read it.
            for tensor in (share.rows_UD, share.indices[0]):
                tensor.record_stream(stream)

    def start_receiving(self, grads_UD: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """Start copying gradients to the host. Return (their place on the host, the event after which they
        are there; None on the CPU)."""
        if self._back is None:
            return grads_UD, None
        host = self._buffer(grads_UD.shape, grads_UD.dtype)
        # The device may still be computing the gradients; the copy must come after.
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with self._on(self._back):
            host.copy_(grads_UD, non_blocking=True)
            grads_UD.record_stream(self._back)  # its memory must not be reused before the copy has read it
            done = torch.cuda.Event()
            done.record(self._back)
        return host, done

    def _buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._cuda)

    def _start_copy(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor, "torch.cuda.Event | None"]:
        with self._on(self._to):  # memory belongs to the stream that allocates it
            one, two = (tensor.to(self.device, non_blocking=True) for tensor in (one, two))
        if self._to is None:
            return one, two, None
        ready = torch.cuda.Event()
        ready.record(self._to)
        return one, two, ready

    def _on(self, stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def copied(batch: object, *, pin: bool) -> Any:
    """Return a batch with copies of its CPU tensors and numpy arrays. pin: in pinned memory, from which a
    forward copies tensors to its devices without waiting."""
    copies: dict[int, object] = {}  # what occurs twice stays one

    def copy(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.copy()
        if not isinstance(value, Tensor) or not value.is_cpu or value.layout is not torch.strided:
            return value
        if value.requires_grad:  # its gradient belongs to the source's tensor
            return value
        if not pin:
            return value.clone()
        return (value.clone() if value.is_pinned() else value).pin_memory()

    return tree_map(lambda value: copies.setdefault(id(value), copy(value)), batch)
