"""Rows on their way to the replicas of a region, and the rows' gradients on their way back.

Letters: N ids of one replica's share, U unique ids among them, C rows changed meanwhile, D width of a row.

Each replica gets the unique rows of its own share, straight from the table to its device: gathered into a
pinned buffer, sent on a stream of its own together with the indices that expand them, while the devices still
work on the batch before. Rows that an update has changed since are sent again just before they are used. On
the device the rows are a leaf; gradients of repeated ids are summed there, so that one gradient a unique row
comes back.

Pinned buffers go round by torch's caching host allocator: one is given out again when the copies from or to
it have ended.

On the CPU (virtual devices) the same code runs: buffers are plain memory, a device copy is a copy, streams
and events do nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from dphybrid.embedding.lookup import Counters, Occurrences, sum_by_row

_ALIGNMENT = 16  # a view of another type must begin at a multiple of its size

SizesOf = Callable[[int], Sequence[int]]
"""From the number of rows of a batch to the rows of each replica's share."""


class DeviceRows(torch.autograd.Function):
    """rows_UD and `Occurrences.indices` -> rows_ND on a replica's device; gradients of repeated ids are
    summed there."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, inverse_N: Tensor, *occurrences: Tensor) -> Tensor:
        ctx.save_for_backward(*occurrences)
        return rows_UD.index_select(0, inverse_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_ND: Tensor) -> tuple[Tensor | None, ...]:
        # A bag is summed by one thread in order: unlike index_add_, the same bits every time on a GPU too.
        return sum_by_row(grads_ND.contiguous(), *ctx.saved_tensors), None, None, None, None


@dataclass
class Share:
    """One replica's part of a lookup, on its way to the device or there, by `channel`.

    where: its unique ids, on the host. shape: of its ids. rows_UD, indices (of `where`): on the device.
    memory: what they are views of. ready: when they have arrived (None on the CPU).
    """

    channel: "Channel"
    where: Occurrences
    shape: torch.Size
    memory: Tensor
    rows_UD: Tensor
    indices: Sequence[Tensor]
    ready: "torch.cuda.Event | None"
    gather_ms: float


class Channel:
    """The way to one replica's device and back. Sending may happen in a worker thread, repairing and
    receiving in the main one."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self.device, self._counters = device, counters
        self._cuda = device.type == "cuda"
        self._to = torch.cuda.Stream(device) if self._cuda else None
        self._back = torch.cuda.Stream(device) if self._cuda else None
        self._timed: deque[float | tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def send(
        self, where: Occurrences, shape: torch.Size, read: Callable[[Tensor, Tensor], None], like: Tensor
    ) -> Share:
        """Have `read(ids_U, out_UD)` fill a buffer with the rows, and start sending it. like: an empty tensor
        (0, D) of the rows' type."""
        shape_UD, on_host = (len(where.unique_U), like.shape[1]), where.indices()
        parts = _layout([(shape_UD, like.dtype), *((tuple(each.shape), each.dtype) for each in on_host)])
        memory = self._host_memory(parts[-1][0].stop)
        rows_UD, *indices = _views(memory, parts)
        start = time.perf_counter()
        read(where.unique_U, rows_UD)
        gather_ms = 1e3 * (time.perf_counter() - start)
        for target, source in zip(indices, on_host, strict=True):
            target.copy_(source)
        there, ready = self._start_copy(memory)
        rows_UD, *indices = _views(there, parts)
        return Share(self, where, shape, there, rows_UD, indices, ready, gather_ms)

    def mend(self, share: Share, places_C: Tensor, read: Callable[[Tensor], None]) -> None:
        """Have `read(out_CD)` fill a buffer, and put its rows in the places of those that are
        there or on their way."""
        shape = (len(places_C), share.rows_UD.shape[1])
        parts = _layout([(shape, share.rows_UD.dtype), ((len(places_C),), places_C.dtype)])
        memory = self._host_memory(parts[-1][0].stop)
        self._counters.bytes_to_devices += len(memory)
        rows_CD, places = _views(memory, parts)
        read(rows_CD)
        places.copy_(places_C)
        there, share.ready = self._start_copy(memory)
        with self._on(self._to):  # behind both copies, in the same stream
            rows_CD, places = _views(there, parts)
            share.rows_UD.index_copy_(0, places, rows_CD)
            if self._to is not None and share.ready is not None:
                share.ready.record(self._to)

    def arrive(self, share: Share, counted: bool) -> None:
        """Make what the caller computes next on the device wait for the share."""
        if counted:
            self._counters.gather_ms += share.gather_ms
            self._counters.bytes_gathered += share.rows_UD.nbytes
            self._counters.bytes_to_devices += len(share.memory)
        if share.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(share.ready)
            # the allocator would else hand the memory, of another stream, out before this one has read it
            share.memory.record_stream(stream)
        self.settle_times()  # in every step: events that wait for a reader would pile up

    def start_receiving(self, grads_UD: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """Start copying gradients to the host; return where they will be once the event has happened."""
        self._counters.bytes_from_devices += grads_UD.nbytes
        if self._back is None:
            return grads_UD, None
        host = torch.empty(grads_UD.shape, dtype=grads_UD.dtype, pin_memory=True)
        # gradients are still being computed there; the copy must come after them
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with self._on(self._back):
            host.copy_(grads_UD, non_blocking=True)
            grads_UD.record_stream(self._back)
            done = torch.cuda.Event()
            done.record(self._back)
        return host, done

    def settle_times(self) -> None:
        """Add the durations of finished copies to the counters, which only the thread that trains does."""
        while self._timed and (isinstance(took := self._timed[0], float) or took[1].query()):
            self._timed.popleft()
            self._counters.h2d_ms += took if isinstance(took, float) else took[0].elapsed_time(took[1])

    def reserve(self, num_bytes: int, count: int) -> None:
        """Have the pinned memory of `count` such copies allocated, which goes round from then on.

        Called before the first forward: an allocation of pinned memory beside the broadcast of a forward on
        several GPUs has hung others (pytorch#31095).
        """
        if self._cuda:
            held = [self._host_memory(num_bytes) for _ in range(count)]
            del held

    def _host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._cuda)

    def _start_copy(self, memory: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
        start = time.perf_counter()
        if self._to is None:
            there = torch.empty(len(memory), dtype=torch.uint8, device=self.device).copy_(memory)
            self._timed.append(1e3 * (time.perf_counter() - start))
            return there, None
        with self._on(self._to):  # the memory there, too, belongs to the stream that writes it first
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            there = torch.empty(len(memory), dtype=torch.uint8, device=self.device)
            began.record(self._to)
            there.copy_(memory, non_blocking=True)
            ended.record(self._to)
        self._timed.append((began, ended))
        ready = torch.cuda.Event()
        ready.record(self._to)
        return there, ready

    def _on(self, stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def pinned(batch: object, *, anew: bool = False) -> Any:
    """Return a batch whose tensors on the CPU lie in pinned memory, from where a forward copies them to its
    devices without waiting. anew: also those that do already."""

    def pin(value: object) -> object:
        if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return value
        return (value.clone() if anew else value).pin_memory() if anew or not value.is_pinned() else value

    return tree_map(pin, batch)


def _layout(
    wanted: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> list[tuple[slice, tuple[int, ...], torch.dtype]]:
    """Places of several tensors, one behind the other in one piece of memory."""
    parts, start = [], 0
    for shape, dtype in wanted:
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        parts.append((slice(start, stop), shape, dtype))
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
    return parts


def _views(memory: Tensor, parts: Sequence[tuple[slice, tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    return [memory[place].view(dtype).view(shape) for place, shape, dtype in parts]
