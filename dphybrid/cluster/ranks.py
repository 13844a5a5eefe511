"""The processes of a cluster's run: who is which, sums over all of them, and what one tells the others."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dphybrid.cluster.launch import STORE

T = TypeVar("T")


class LostRanks(RuntimeError):
    """Another rank is gone, or did not answer within the time limit."""


@dataclass(frozen=True)
class Ranks:
    """This process among all. local_size: how many its machine has. device: of its blocks."""

    rank: int
    size: int
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
        """Return rank 0's value on every rank; the other ranks' values are ignored."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def all_told(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks."""
        boxes: list[T | None] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes  # type: ignore[return-value]


@contextmanager
def joined(
    timeout_s: float,
    device: torch.device,
    wait_s: float | None = None,
    look: Callable[[], None] = lambda: None,
) -> Iterator[Ranks]:
    """Be one of the ranks of a run, as `launch` says in this process's variables.

    timeout_s: how long one waits for the others in anything they do together; a rank that is gone is noticed
    at once. wait_s: how long all may take to begin; `look`, called meanwhile, may raise to leave. Raises
    LostRanks when they do not come together in that time, or from the block when one is gone.
    """
    # row gradients go by the device's backend, objects and rows of checkpoints by the CPU's
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout_s)
    with _lost():
        rank, size, local_size = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        store = _all_here(os.environ[STORE], size, wait_s or timeout_s, look)
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        yield Ranks(rank, size, local_size, device)
        dist.destroy_process_group()  # a rank that fails leaves without waiting for the others


@contextmanager
def _lost() -> Iterator[None]:
    """Raise LostRanks for torch's errors of connections."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0].partition(". This is")[0]
        # gloo raises plain RuntimeErrors
        if not isinstance(error, dist.DistError) and not re.search("gloo/|[Gg]loo |pair closure", first):
            raise
        raise LostRanks(f"rank {os.environ['RANK']}: lost the other ranks ({first[:200]})") from error


def _all_here(path: str, size: int, wait_s: float, look: Callable[[], None]) -> dist.Store:
    """Return the store in which the ranks exchange their addresses: a file, which no network reaches."""
    store, deadline = dist.FileStore(path, size), time.monotonic() + wait_s
    # Whoever is last says so to all; torch's own waiting could not be interrupted by `look`.
    if store.add("begun", 1) == size:
        store.set("all", "begun")
    while not store.check(["all"]):
        look()
        if time.monotonic() > deadline:
            raise LostRanks(f"not all of {size} ranks began within {wait_s:g} s")
        time.sleep(0.1)
    return store
