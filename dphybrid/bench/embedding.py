"""Side by side, in one run: the engine against torch's own embeddings and optimizers, and the pipeline against itself.

`python -m dphybrid.bench.embedding [--json FILE]` prints the tables; `run` returns the numbers. Medians of rounds in which all contestants
take turns, warm-up left out: a busy moment of the machine hits them alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import kernels
from dphybrid.embedding.lookup import sort_ids
from dphybrid.embedding.optim import make_row_optimizer
from dphybrid.embedding.pipeline import RowPipeline
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.files import write_json

Step = Callable[[], object]


def zipf_ids(num_rows: int, shape: tuple[int, ...], exponent: float = 1.05, seed: int = 0) -> Tensor:
    """Return int64 ids whose frequencies fall like rank ** -exponent, spread over the whole table by a fixed permutation's stride."""
    chance = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    power = 1 - exponent
    ranks = ((num_rows**power * chance + 1 - chance) ** (1 / power)).long().clamp_(1, num_rows) - 1
    stride = 1_000_003 if num_rows % 1_000_003 else 1
    return ranks * stride % num_rows


def medians_ms(contestants: Mapping[str, Step], rounds: int, warm_up: int = 3) -> dict[str, float]:
    """Return the median milliseconds of each contestant over `rounds` rounds in which they take turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warm_up + rounds):
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            if turn >= warm_up:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def copy_gib_per_s() -> float:
    """Return the machine's copy bandwidth (bytes read plus bytes written) on arrays of 128 MiB, with torch's present number of threads."""
    source, target = torch.ones(2**25), torch.empty(2**25)
    return 0.25 / (medians_ms({"copy": lambda: target.copy_(source)}, 5)["copy"] / 1e3)


def step_costs(num_rows: int, dim: int, num_ids: int, rounds: int, exponent: float = 1.05) -> dict[str, float]:
    """Return ms of one whole step on the CPU (lookup, backward, update) by contestant, and of the host's share alone.

    The host's share is what is left when a device sums the gradients of repeated ids: sorting, gathering and updating unique rows. Dense
    contestants are left out where their gradient would take more than 1 GiB.
    """
    ids = zipf_ids(num_rows, (num_ids,), exponent)
    grads_ND = torch.randn(num_ids, dim, generator=torch.Generator().manual_seed(1))
    contestants: dict[str, Step] = {}
    for name in ("sgd", "adagrad", "adam", "lazy-adam"):
        table = HostEmbedding(num_rows, dim)
        rows = make_row_optimizer(name, {"t": table}, lr=0.01)
        grads_UD = torch.randn(len(ids.unique()), dim)
        buffer_UD = torch.empty_like(grads_UD)

        def whole(table: HostEmbedding = table, rows: Any = rows) -> None:
            rows.zero_grad()
            table(ids).backward(grads_ND)
            rows.step()

        def host(
            table: HostEmbedding = table, rows: Any = rows, grads_UD: Tensor = grads_UD, buffer_UD: Tensor = buffer_UD
        ) -> None:
            unique_U = sort_ids(ids, num_rows).unique_U
            kernels.gather(table.weight, unique_U, buffer_UD)
            table.set_row_gradients(unique_U, grads_UD)
            rows.step()

        contestants[f"dphybrid {name}"] = whole
        contestants[f"dphybrid {name}, host share"] = host
    stock: dict[str, tuple[bool, Any]] = {
        "sparse=True + SGD": (True, torch.optim.SGD),
        "sparse=True + Adagrad": (True, torch.optim.Adagrad),
        "sparse=True + SparseAdam": (True, torch.optim.SparseAdam),
    }
    if num_rows * dim * 4 <= 2**28:
        stock |= {"dense + SGD": (False, torch.optim.SGD), "dense + Adam": (False, torch.optim.Adam)}
    for name, (sparse, kind) in stock.items():
        embedding = nn.Embedding(num_rows, dim, sparse=sparse)
        optimizer = kind(embedding.parameters(), lr=0.01)

        def step(embedding: nn.Embedding = embedding, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            embedding(ids).backward(grads_ND)
            optimizer.step()

        contestants[name] = step
    if find_spec("fbgemm_gpu"):
        contestants |= _fbgemm([num_rows], dim, ids, grads_ND)
    return medians_ms(contestants, rounds)


def many_tables_costs(
    batch_size: int, rounds: int, num_tables: int = 26, rows_each: int = 100_000, dim: int = 16
) -> dict[str, float]:
    """Return ms of a step over many small tables: one flat table with shifted ids against one nn.EmbeddingBag a table, and FBGEMM's tables."""
    ids_BF = torch.stack([zipf_ids(rows_each, (batch_size,), seed=column) for column in range(num_tables)], 1)
    grads_BFD = torch.randn(batch_size, num_tables, dim)
    table = HostEmbedding(num_tables * rows_each, dim)
    rows = make_row_optimizer("adagrad", {"t": table}, lr=0.01)
    offsets_F = torch.arange(num_tables) * rows_each
    bags = nn.ModuleList(nn.EmbeddingBag(rows_each, dim, mode="sum", sparse=True) for _ in range(num_tables))
    sgd, adagrad = torch.optim.SGD(bags.parameters(), lr=0.01), torch.optim.Adagrad(bags.parameters(), lr=0.01)

    def ours() -> None:
        rows.zero_grad()
        table(ids_BF + offsets_F).backward(grads_BFD)
        rows.step()

    def theirs(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        columns = [bag(ids_B.unsqueeze(1)) for bag, ids_B in zip(bags, ids_BF.T.contiguous(), strict=True)]
        torch.stack(columns, 1).backward(grads_BFD)
        optimizer.step()

    contestants: dict[str, Step] = {
        "dphybrid adagrad, one flat table": ours,
        f"{num_tables} x EmbeddingBag(sparse) + SGD": lambda: theirs(sgd),
        f"{num_tables} x EmbeddingBag(sparse) + Adagrad": lambda: theirs(adagrad),
    }
    if find_spec("fbgemm_gpu"):
        contestants |= _fbgemm([rows_each] * num_tables, dim, ids_BF.T.reshape(-1), grads_BFD.flatten(1))
    found = medians_ms(contestants, rounds)
    if "fbgemm row-wise adagrad" in found:
        found["FBGEMM / dphybrid row-wise adagrad"] = found["fbgemm row-wise adagrad"] / found["dphybrid adagrad, one flat table"]
    return found


def _fbgemm(rows_of_tables: list[int], dim: int, ids_TB: Tensor, grads: Tensor) -> dict[str, Step]:
    """FBGEMM's table-batched embedding on the CPU. ids_TB: B ids of each table, flat. grads: (B, T * dim)."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    kinds = {"sgd": training.OptimType.EXACT_SGD, "row-wise adagrad": training.OptimType.EXACT_ROWWISE_ADAGRAD}
    offsets = torch.arange(len(ids_TB) + 1)
    steps: dict[str, Step] = {}
    for name, kind in kinds.items():
        places = [(rows, dim, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU) for rows in rows_of_tables]
        tables = training.SplitTableBatchedEmbeddingBagsCodegen(places, optimizer=kind, learning_rate=0.01)
        steps[f"fbgemm {name}"] = partial(_backward, partial(tables, ids_TB, offsets), grads)
    return steps


def _backward(forward: Callable[[], Tensor], grads: Tensor) -> None:
    forward().backward(grads)


def size_costs(dim: int, num_ids: int, rounds: int, sizes: tuple[int, ...] = (100_000, 10_000_000)) -> dict[str, float]:
    """Return ms of a row-wise Adagrad step by table size, for the same number of unique ids spread over the table."""
    contestants: dict[str, Step] = {}
    for num_rows in sizes:
        generator = torch.Generator().manual_seed(num_rows)
        batches = [torch.randperm(num_rows, generator=generator)[:num_ids] for _ in range(4)]
        grads_ND = torch.randn(num_ids, dim)
        table = HostEmbedding(num_rows, dim)
        rows = make_row_optimizer("adagrad", {"t": table}, lr=0.01)
        turns = _cycle(batches)

        def step(
            table: HostEmbedding = table, rows: Any = rows, turns: Iterator[Tensor] = turns, grads: Tensor = grads_ND
        ) -> None:
            rows.zero_grad()
            table(next(turns)).backward(grads)
            rows.step()

        contestants[f"{num_rows:,} rows"] = step
    return medians_ms(contestants, rounds, warm_up=8)


def _cycle(batches: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from batches


def pipeline_costs(
    num_rows: int, dim: int, batch_size: int, columns: int, steps: int, devices: str = "cpu", repeats: int = 9, hidden: int = 128
) -> dict[str, float]:
    """Return ms of a training step of a small network on `devices` with the pipeline off and exact, their ratio, and the counters of a
    step with the exact one.

    On a GPU also: device ms, what a step takes there with its rows already in place; host ms, of sorting, gathering, repairing and updating;
    copy ms; and overlap efficiency, the largest of the three by the step: 1 means that all else is hidden behind it.
    """
    from dphybrid.parallel import DataParallel, parts

    batches = [zipf_ids(num_rows, (batch_size, columns), seed=step) for step in range(steps)]
    table = HostEmbedding(num_rows, dim)
    rows = make_row_optimizer("adagrad", {"t": table}, lr=0.01)
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
        with RowPipeline({"t": table}, mode=mode) as pipeline:
            for ids_BF in pipeline.prefetch(batches, lambda ids: {"t": ids}):
                rows.zero_grad()
                learn(table.replica_rows(ids_BF))
                rows.step()
            if gpu:
                torch.cuda.synchronize()
            if mode == "exact":
                counters.update(pipeline.counters(steps))

    contestants: dict[str, Step] = {"off": lambda: epoch("off"), "exact": lambda: epoch("exact")}
    if gpu:
        there = [rows_BFD.detach().requires_grad_() for rows_BFD in table.replica_rows(batches[0])]

        def on_device() -> None:
            for _ in range(steps):
                learn(there)
            torch.cuda.synchronize()

        contestants["device"] = on_device
    found = {f"{name} ms": value / steps for name, value in medians_ms(contestants, repeats, warm_up=2).items()}
    found["exact / off"] = found["exact ms"] / found["off ms"]
    if gpu:
        found["host ms"] = sum(counters[f"{part}_ms"] for part in ("dedup", "gather", "repair", "update"))
        found["copy ms"] = counters["h2d_ms"] + counters["d2h_ms"]
        found["overlap efficiency"] = max(found["host ms"], found["copy ms"], found["device ms"]) / found["exact ms"]
    return found | counters


def run(threads: tuple[int, ...] = (1, 2), rounds: int = 15, scale: float = 1.0) -> dict[str, Any]:
    """Measure everything for each number of threads; return nested dicts of milliseconds and ratios. scale: of table sizes and ids."""
    num_rows, dim, num_ids = int(1_000_000 * scale), 64, int(53_248 * scale)
    before = torch.get_num_threads()
    results: dict[str, Any] = {"torch": torch.__version__, "shape": f"{num_rows:,} x {dim}, {num_ids:,} Zipf(1.05) ids"}
    try:
        for count in threads:
            torch.set_num_threads(count)
            bandwidth = copy_gib_per_s()
            # torch's sparse Adagrad warns unless told whether to check; checks would slow it down.
            with torch.sparse.check_sparse_tensor_invariants(False):
                step_ms = step_costs(num_rows, dim, num_ids, rounds)
                many_ms = {
                    f"26 tables, batch {batch_size}": many_tables_costs(batch_size, rounds, rows_each=int(100_000 * scale))
                    for batch_size in (128, 2048)
                }
            num_unique = len(zipf_ids(num_rows, (num_ids,)).unique())
            # Unique rows read for the lookup and for the update, written once; expanded rows written, their gradients read, sums written.
            moved = 4 * dim * (3 * num_unique + 2 * num_ids + num_unique)
            floor = moved / 2**30 / bandwidth * 1e3
            results[f"threads={count}"] = {
                "copy GiB/s": bandwidth,
                "step ms": step_ms,
                "ratios": ratios(step_ms) | {"dphybrid adagrad / floor": step_ms["dphybrid adagrad"] / floor},
                "floor ms": floor,
                **many_ms,
                "by table size": size_costs(16, int(20_000 * scale), rounds, (int(100_000 * scale), int(10_000_000 * scale))),
                **pipelines(num_rows, dim, scale, min(9, rounds)),
            }
    finally:
        torch.set_num_threads(before)
    return results


def pipelines(num_rows: int, dim: int, scale: float, repeats: int) -> dict[str, dict[str, float]]:
    """Return `pipeline_costs` by shape, on the CPU, on two virtual devices and on all GPUs."""
    places = ["cpu", "cpu*2"]
    if torch.cuda.is_available():
        places.append(",".join(f"cuda:{index}" for index in range(torch.cuda.device_count())))
    shapes = {"batch 256": (16, int(256 * scale), 40), "batch 2048": (dim, int(2048 * scale), 10)}
    return {
        f"pipeline on {place}, {name}": pipeline_costs(
            num_rows, width, max(2, batch_size), 26, steps, place, repeats, hidden=2048 if place.startswith("cuda") else 128
        )
        for place in places
        for name, (width, batch_size, steps) in shapes.items()
    }


def ratios(step_ms: Mapping[str, float]) -> dict[str, float]:
    """Return how many times as long torch's sparse steps and, where it is installed, FBGEMM's take: against the whole step, and against
    the host's share of it."""
    found = {}
    for name in ("sgd", "row-wise adagrad"):
        if f"fbgemm {name}" in step_ms:
            found[f"FBGEMM / dphybrid {name}"] = step_ms[f"fbgemm {name}"] / step_ms[f"dphybrid {name.split()[-1]}"]
    for stock, ours in (("SparseAdam", "adam"), ("Adagrad", "adagrad")):
        theirs = step_ms[f"sparse=True + {stock}"]
        found[f"{stock} / dphybrid {ours}"] = theirs / step_ms[f"dphybrid {ours}"]
        found[f"{stock} / dphybrid {ours}, host share"] = theirs / step_ms[f"dphybrid {ours}, host share"]
    return found


def table_text(results: Mapping[str, Any], indent: str = "") -> str:
    """Return the results as aligned lines."""
    width = max((len(name) for name, value in results.items() if not isinstance(value, Mapping)), default=0)
    lines = []
    for name, value in results.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}", table_text(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name:<{width}}  {f'{value:10.3f}' if isinstance(value, float) else value}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the host embedding engine beside torch's own.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of torch threads (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds behind each median (default: 15)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on table sizes and ids (default: 1)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    results = run(tuple(options.threads), options.rounds, options.scale)
    print(table_text(results))
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
