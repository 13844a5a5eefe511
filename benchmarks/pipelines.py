"""Whole training steps with the pipeline off and exact and, where it has a worker thread, how much of the
parts' own time it hides.

Letters: B samples, F id columns, D width of a row.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.racing import Step, medians_ms, zipf_ids
from benchmarks.steps import parts_alone
from dphybrid.embedding import HostEmbedding, RowPipeline, row_optimizer
from dphybrid.parallel import DataParallel, parts


def pipeline_costs(
    num_rows: int,
    dim: int,
    batch_size: int,
    columns: int,
    steps: int,
    devices: str = "cpu",
    repeats: int = 9,
    hidden: int = 128,
    *,
    on_cpu: bool = False,
) -> dict[str, float]:
    """Return ms of a training step of a small network on `devices` with the pipeline off and exact, their
    ratio, and the pipeline's counters for an exact step.

    On a GPU, also ms of each part of a step by itself (see `steps.parts_alone`), and two ratios that show the
    overlap. all parts / exact: 1 when the parts run one after the other, more when they overlap. longest part
    / exact: 1 when all other parts are hidden behind it. on_cpu: with a worker thread and these figures
    without a GPU, too, as a rehearsal.
    """
    batches = [zipf_ids(num_rows, (batch_size, columns), seed=step) for step in range(steps)]
    table = HostEmbedding(num_rows, dim, seed=0)
    rows = row_optimizer("adagrad", {"t": table}, lr=0.01)
    layers = (
        nn.Flatten(1),
        nn.Linear(columns * dim, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 1),
    )
    region = DataParallel(nn.Sequential(*layers), devices)
    dense = torch.optim.SGD(region.parameters(), lr=1e-4)
    table.place_on(region.devices.replicas, region.sizes)
    gpu = region.devices.home.type == "cuda"
    counters: dict[str, float] = {}

    def learn(rows_of_replicas: list[Tensor]) -> None:
        dense.zero_grad()
        F.softplus(region(parts(rows_of_replicas))).mean().backward()
        dense.step()

    def epoch(mode: str) -> None:
        with RowPipeline({"t": table}, mode=mode, on_cpu=on_cpu) as pipeline:
            for ids_BF in pipeline.prefetch(batches, lambda ids: {"t": ids}):
                rows.zero_grad()
                learn(table.replica_rows(ids_BF))
                rows.step()
            if gpu:
                torch.cuda.synchronize()
            if mode == "exact":
                counters.update(pipeline.counters(steps))

    contestants: dict[str, Step] = {"off": lambda: epoch("off"), "exact": lambda: epoch("exact")}
    found = {
        f"{name} ms": value / steps for name, value in medians_ms(contestants, repeats, warm_up=2).items()
    }
    found["exact / off"] = found["exact ms"] / found["off ms"]
    if gpu or on_cpu:
        by_part = parts_alone(batches[0], num_rows, dim, region, learn, repeats)
        found |= {f"{name}, alone ms": took_ms for name, took_ms in by_part.items()}
        found["all parts / exact"] = sum(by_part.values()) / found["exact ms"]
        found["longest part / exact"] = max(by_part.values()) / found["exact ms"]
    return found | counters


def pipelines(num_rows: int, dim: int, scale: float, repeats: int) -> dict[str, dict[str, float]]:
    """Return place and shape -> `pipeline_costs`: on the CPU, on two virtual devices and on all GPUs."""
    places = ["cpu", "cpu*2"]
    if torch.cuda.is_available():
        places.append(",".join(f"cuda:{index}" for index in range(torch.cuda.device_count())))
    shapes = {"batch 256": (16, int(256 * scale), 40), "batch 2048": (dim, int(2048 * scale), 10)}
    return {
        f"pipeline on {place}, {name}": pipeline_costs(
            num_rows,
            width,
            max(2, batch_size),
            26,
            steps,
            place,
            repeats,
            hidden=2048 if place.startswith("cuda") else 128,
        )
        for place in places
        for name, (width, batch_size, steps) in shapes.items()
    }
