"""The processes of a cluster's run: who is which, sums over all of them, and what one tells the others."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among all. local_rank, local_size: among those of its machine. device: of its blocks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Is this the one that keeps the record and the checkpoints?"""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all ranks in place; return it."""
        dist.all_reduce(values)
        return values

    def told(self, value: T | None) -> T:
        """Return what rank 0 gave; what the others give says nothing."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def all_told(self, value: T) -> list[T]:
        """Return what each rank gave, in order."""
        boxes: list[T | None] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes  # type: ignore[return-value]


@contextmanager
def joined(timeout_s: float, device: torch.device) -> Iterator[Ranks]:
    """Be one of the ranks that torchrun started, as its variables say.

    timeout_s: how long one waits for the others in anything they do together; a rank that is gone is
    noticed at once. Raises RuntimeError (torch's) when they do not come together in that time.
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    yield Ranks(
        dist.get_rank(),
        dist.get_world_size(),
        int(os.environ["LOCAL_RANK"]),
        int(os.environ["LOCAL_WORLD_SIZE"]),
        device,
    )
    dist.destroy_process_group()  # a rank that fails leaves without waiting for the others
