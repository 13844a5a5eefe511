"""The connection of a rank to the others: its number, sums over all ranks, and exchange of objects."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dphybrid.cluster.launch import address_file

T = TypeVar("T")


class LostRanks(RuntimeError):
    """Another rank has died or did not answer within the time limit."""


@dataclass(frozen=True)
class Ranks:
    """This process as one of `size` ranks.

    Attributes:
        local_size: Ranks on this machine.
        device: Of its blocks.
        folder: The run's.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    folder: Path

    @property
    def leads(self) -> bool:
        """Whether this rank writes the record and the checkpoints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all ranks in place; return it."""
        dist.all_reduce(values)
        return values

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value on every rank; the values of the others are ignored."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks."""
        boxes: list[T | None] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes  # type: ignore[return-value]


@contextmanager
def joined(timeout_s: float, device: torch.device, folder: Path) -> Iterator[Ranks]:
    """Connect to the other ranks of the run in `folder`, as torchrun's environment variables say.

    timeout_s: how long a rank waits for the others in a joint operation; a rank that died is noticed at once.
    Raises LostRanks if not all ranks start in time, or if one is lost during the block.
    """
    # Two backends on a GPU: NCCL for row gradients, gloo for objects and for the rows of checkpoints.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout_s)
    with _connection_errors():
        again, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
        if again != "0" and os.environ["LOCAL_RANK"] == "0":
            print(
                "A rank ended with an error: restarting all ranks from the newest checkpoint "
                f"(restart {again} of {most})",
                flush=True,
            )
        rank, size, local_size = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        # Addresses are exchanged in a file, so that nobody on the network can read or change them.
        store = dist.FileStore(str(address_file(folder)), size)
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        yield Ranks(rank, size, local_size, device, folder)
        # Not in a finally: it would make a rank that failed wait for the others.
        dist.destroy_process_group()


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise LostRanks instead of torch's connection errors."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0].partition(". This is")[0]
        # gloo raises plain RuntimeErrors, which only their text tells from others.
        if not isinstance(error, dist.DistError) and not re.search("gloo/|[Gg]loo |pair closure", first):
            raise
        raise LostRanks(f"rank {os.environ['RANK']}: lost the other ranks ({first[:200]})") from error
