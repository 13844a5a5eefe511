"""Times for one shape of model on some devices: each part of a step alone, whole steps with and without the
pipeline, and torch's embeddings in the memory of the first device and of the host.

Medians of turns. A turn ends when the devices have finished its work.

Letters: B samples, F id columns, N ids of a share, U unique ones, D width of a row.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.racing import cycle, race, race_loops, zipf_ids
from dphybrid.embedding import HostEmbedding, RowPipeline, clip_grad_norm_, native, row_optimizer
from dphybrid.embedding.gradients import sparse
from dphybrid.embedding.lookup import sort_ids
from dphybrid.embedding.replicas import DeviceRows
from dphybrid.parallel import DataParallel, Devices, parts, resolve_devices

ON_DEVICE_BYTES = 2**35
"""Largest table that torch's embedding puts into a device's memory."""


@dataclass(frozen=True)
class Shape:
    """A model: `columns` tables of `rows_each` rows of width `dim`, one id of each per sample, and `layers`
    layers of `hidden` units. uniform: draw ids uniformly instead of by Zipf's law."""

    rows_each: int
    columns: int
    dim: int
    batch: int
    hidden: int = 512
    layers: int = 3
    uniform: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of all tables, which are one flat table here."""
        return self.rows_each * self.columns

    def ids(self, seed: int) -> Tensor:
        """Return ids_BF of a batch."""
        size, draw = (self.batch,), torch.Generator().manual_seed(seed)
        columns = [
            torch.randint(0, self.rows_each, size, generator=draw)
            if self.uniform
            else zipf_ids(self.rows_each, size, seed=97 * seed + column)
            for column in range(self.columns)
        ]
        return torch.stack(columns, 1) + torch.arange(self.columns) * self.rows_each

    def region(self) -> nn.Module:
        """Return the dense block."""
        torch.manual_seed(0)  # all contestants start from the same weights
        widths = [self.columns * self.dim] + [self.hidden] * self.layers
        between = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(1), *between, nn.Linear(widths[-1], 1))


def measured(shape: Shape, devices: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return ms of each part alone and of whole steps, ratios, and the pipeline's counters for a step."""
    where = resolve_devices(devices)
    batches = [shape.ids(seed) for seed in range(4)]
    region = DataParallel(shape.region(), where)

    def learn(rows_of_replicas: list[Tensor]) -> None:
        region(parts(rows_of_replicas)).square().mean().backward()

    by_part = parts_alone(batches[0], shape.num_rows, shape.dim, region, learn, rounds)
    counters: dict[str, float] = {}
    by_way = _ways(shape, batches, where, rounds, counters)
    exact = by_way["exact"]
    ratios = {
        "off / exact": by_way["off"] / exact,
        "all parts / exact": sum(by_part.values()) / exact,
        "longest part / exact": max(by_part.values()) / exact,
        "samples per second": 1e3 * shape.batch / exact,
        "most occurrences of an id": float(torch.bincount(batches[0].reshape(-1)).max()),
    }
    ratios |= {f"{way} / exact": ms / exact for way, ms in by_way.items() if "torch" in way}
    return {"parts_ms": by_part, "step_ms": by_way, "ratios": ratios, "counters": counters}


def _wait(where: Devices) -> None:
    # A kernel launch returns at once: without this, a turn would time only the launches.
    for place in dict.fromkeys(where.replicas):
        if place.type == "cuda":
            torch.cuda.synchronize(place)


def parts_alone(
    ids_BF: Tensor,
    num_rows: int,
    dim: int,
    region: DataParallel,
    learn: Callable[[list[Tensor]], object],
    rounds: int,
) -> dict[str, float]:
    """Return ms of each part of a step by itself, over all replicas of a region.

    learn: forward and backward on the devices, given each replica's rows_bFD. The part "device" also expands
    the rows of repeated ids and sums their gradients; the copies move unique rows only.
    """
    where = region.devices
    cuda = where.home.type == "cuda"
    table = HostEmbedding(num_rows, dim, seed=0)
    rows = row_optimizer("adagrad", {"t": table}, lr=0.01)
    # strict=False below: a short batch leaves some replicas without a share.
    each = ids_BF.split(list(region.sizes(len(ids_BF))))
    shares = list(zip(each, where.replicas, strict=False))
    found = [sort_ids(ids.reshape(-1), num_rows) for ids, _ in shares]
    # A GPU copies in the background only from and to pinned memory.
    host = [torch.empty(len(one.unique_U), dim, pin_memory=cuda) for one in found]
    there = [torch.empty(mine.shape, device=place) for mine, (_, place) in zip(host, shares, strict=True)]
    maps = [[t.to(place) for t in one.indices()] for one, (_, place) in zip(found, shares, strict=True)]

    def device() -> None:
        leaves = [mine.detach().requires_grad_() for mine in there]
        # Expands unique rows to one per id, on the device; the backward sums the gradients of repeated ids.
        rows_BFD = [
            DeviceRows.apply(leaf, *one).view(*ids.shape, dim)
            for leaf, one, (ids, _) in zip(leaves, maps, shares, strict=True)
        ]
        learn(rows_BFD)

    def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    def update() -> None:
        rows.zero_grad()
        for one, mine in zip(found, host, strict=True):
            table.weight.grad = sparse(one.unique_U, mine, table.weight.shape)
            rows.step()

    def gather() -> None:
        for one, mine in zip(found, host, strict=True):
            native.look_up(table.weight.detach(), one.unique_U, mine)

    steps: dict[str, Callable[[], object]] = {
        "sort": lambda: [sort_ids(ids.reshape(-1), num_rows) for ids, _ in shares],
        "gather": gather,
        "to the devices": lambda: copy(there, host),
        "device": device,
        "from the devices": lambda: copy(host, there),
        "update": update,
    }

    def ended(step: Callable[[], object]) -> Callable[[], object]:
        def run_it() -> None:
            step()
            _wait(where)

        return run_it

    return {name: timing.ms for name, timing in race({n: ended(s) for n, s in steps.items()}, rounds).items()}


def _ways(
    shape: Shape, batches: list[Tensor], where: Devices, rounds: int, counters: dict[str, float]
) -> dict[str, float]:
    """Return ms of whole steps: with the pipeline off and exact, and with torch's embeddings in the memory of
    the first device and of the host. counters: filled with the exact pipeline's counters for a step."""

    def ours(mode: str) -> Iterator[None]:
        table = HostEmbedding(shape.num_rows, shape.dim, seed=0)
        rows = row_optimizer("adagrad", {"t": table}, lr=0.01)
        region = DataParallel(shape.region(), where)
        table.place_on(where.replicas, region.sizes)
        dense = torch.optim.SGD(region.parameters(), lr=0.01)
        # on_cpu: by itself the pipeline prefetches only for GPUs; a rehearsal should run the same code.
        with RowPipeline({"t": table}, mode=mode, on_cpu=True) as pipeline:
            for ids_BF in pipeline.prefetch(cycle(batches), lambda ids: {"t": ids}):
                rows.zero_grad()
                dense.zero_grad()
                region(parts(table.replica_rows(ids_BF))).square().mean().backward()
                # Torch's loops below do not clip, so this one does more work than they do.
                clip_grad_norm_([*region.parameters(), table.weight], 1.0)
                dense.step()
                rows.step()
                if mode == "exact":
                    counters.update(pipeline.counters())
                yield

    def theirs(place: torch.device) -> Iterator[None]:
        embedding = nn.Embedding(shape.num_rows, shape.dim, sparse=True, device=place)
        region = shape.region().to(where.home)
        dense = torch.optim.SGD(region.parameters(), lr=0.01)
        rows = torch.optim.Adagrad(embedding.parameters(), lr=0.01)
        for ids_BF in cycle(batches):
            rows.zero_grad()
            dense.zero_grad()
            region(embedding(ids_BF.to(place)).to(where.home)).square().mean().backward()
            dense.step()
            rows.step()
            yield

    loops = {"off": ours("off"), "exact": ours("exact")}
    loops["torch, sparse, on the host"] = theirs(torch.device("cpu"))
    table_bytes = shape.num_rows * shape.dim * 4
    if where.home.type == "cuda" and table_bytes <= ON_DEVICE_BYTES:
        loops["torch, sparse, on the device"] = theirs(where.home)
    return race_loops(loops, rounds, partial(_wait, where))
