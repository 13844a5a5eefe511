"""Time of table lookups and updates, compared with torch's embeddings and optimizers, and of training steps
with and without prefetching.

`run` returns the numbers, `text` formats them.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.command import at_least_one, flags, show
from benchmarks.pipelines import pipelines
from benchmarks.racing import (
    Step,
    Timing,
    copy_gib_per_s,
    cycle,
    medians_ms,
    plain,
    race,
    table_text,
    zipf_ids,
)
from dphybrid.embedding import gradients, native
from dphybrid.embedding.collection import HostEmbeddingCollection
from dphybrid.embedding.lookup import sort_ids
from dphybrid.embedding.optim import row_optimizer
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.memory import keep_freed_memory
from dphybrid.util.row_rules import RULES

LEGEND = """\
Milliseconds per step. A step is lookup, backward and update of the rows, unless a heading names more.
Medians of interleaved rounds; in brackets the 10th and 90th percentile, the CPU time of all threads, and
page faults. "dphybrid" is a table in host memory; "sparse=True" and "dense" are torch.nn.Embedding with
the named optimizer of torch.optim; "host share" is the step without the part that a GPU would do.
A / B is the time of A over the time of B: above 1, B is faster. The floor is the time of copying the
same number of bytes.
"""


def step_costs(
    num_rows: int, dim: int, num_ids: int, rounds: int, exponent: float = 1.05, *, cold: bool = False
) -> dict[str, Timing]:
    """Time one step on the CPU (lookup, backward, update) of each contestant, and the host's share of ours.

    The host's share is the work left when a GPU sums the gradients of repeated ids: sorting ids, gathering
    and updating unique rows. Dense contestants take part if their table has at most 256 MiB.
    """
    # Four batches in turn: the rows of a single one would stay in the caches.
    batches = [zipf_ids(num_rows, (num_ids,), exponent, seed) for seed in range(4)]
    grads_ND = torch.randn(num_ids, dim, generator=torch.Generator().manual_seed(1))
    contestants: dict[str, Step] = {}
    for name in RULES:
        table = HostEmbedding(num_rows, dim, seed=0)
        rows = row_optimizer(name, {"t": table}, lr=0.01)
        buffer_ND = torch.empty_like(grads_ND)
        for_whole, for_host = cycle(batches), cycle(batches)

        # The defaults bind this round's objects; as free variables both would use those of the last round.
        def whole(
            table: HostEmbedding = table, rows: Any = rows, turns: Iterator[Tensor] = for_whole
        ) -> None:
            rows.zero_grad()
            table(next(turns)).backward(grads_ND)
            rows.step()

        def host(
            table: HostEmbedding = table,
            rows: Any = rows,
            buffer_ND: Tensor = buffer_ND,
            turns: Iterator[Tensor] = for_host,
        ) -> None:
            # Any gradient will do: the time depends on its shape, not on its values.
            unique_U = sort_ids(next(turns), num_rows).unique_U
            native.gather(table.settled(), None, unique_U, buffer_ND[: len(unique_U)])
            table.weight.grad = gradients.sparse(unique_U, grads_ND[: len(unique_U)], table.weight.shape)
            rows.step()

        contestants[f"dphybrid {name}"] = whole
        contestants[f"dphybrid {name}, host share"] = host
    stock: dict[str, tuple[bool, Any]] = {
        "sparse=True + SGD": (True, torch.optim.SGD),
        "sparse=True + Adagrad": (True, torch.optim.Adagrad),
        "sparse=True + SparseAdam": (True, torch.optim.SparseAdam),
    }
    # A dense gradient is as large as the table, and so is each of Adam's two moments.
    if num_rows * dim * 4 <= 2**28:
        stock |= {"dense + SGD": (False, torch.optim.SGD), "dense + Adam": (False, torch.optim.Adam)}
    for name, (sparse, kind) in stock.items():
        embedding = nn.Embedding(num_rows, dim, sparse=sparse)
        optimizer = kind(embedding.parameters(), lr=0.01)

        for_stock = cycle(batches)

        def step(
            embedding: nn.Embedding = embedding,
            optimizer: Any = optimizer,
            turns: Iterator[Tensor] = for_stock,
        ) -> None:
            optimizer.zero_grad()
            embedding(next(turns)).backward(grads_ND)
            optimizer.step()

        contestants[name] = step
    if find_spec("fbgemm_gpu"):
        contestants |= _fbgemm([num_rows], dim, batches, grads_ND)
    return race(contestants, rounds, cold=cold)


def many_tables_costs(
    batch_size: int,
    rounds: int,
    num_tables: int = 26,
    rows_each: int = 100_000,
    dim: int = 16,
    *,
    cold: bool = False,
) -> dict[str, Timing | float]:
    """Return ms of a step over many small tables: one flat table with shifted ids, an nn.EmbeddingBag for
    each table, and FBGEMM's tables."""
    batches = [
        torch.stack(
            [zipf_ids(rows_each, (batch_size,), seed=100 * turn + column) for column in range(num_tables)], 1
        )
        for turn in range(4)
    ]
    grads_BFD = torch.randn(batch_size, num_tables, dim)
    table = HostEmbedding(num_tables * rows_each, dim, seed=0)
    rows = row_optimizer("adagrad", {"t": table}, lr=0.01)
    offsets_F = torch.arange(num_tables) * rows_each
    bags = nn.ModuleList(nn.EmbeddingBag(rows_each, dim, mode="sum", sparse=True) for _ in range(num_tables))
    sgd = torch.optim.SGD(bags.parameters(), lr=0.01)
    adagrad = torch.optim.Adagrad(bags.parameters(), lr=0.01)

    turns = cycle(batches)

    def ours() -> None:
        rows.zero_grad()
        table(next(turns) + offsets_F).backward(grads_BFD)
        rows.step()

    def theirs(optimizer: torch.optim.Optimizer, turns: Iterator[Tensor]) -> None:
        optimizer.zero_grad()
        columns = [
            bag(ids_B.unsqueeze(1)) for bag, ids_B in zip(bags, next(turns).T.contiguous(), strict=True)
        ]
        torch.stack(columns, 1).backward(grads_BFD)
        optimizer.step()

    contestants: dict[str, Step] = {
        "dphybrid adagrad, one flat table": ours,
        f"{num_tables} x EmbeddingBag(sparse) + SGD": partial(theirs, sgd, cycle(batches)),
        f"{num_tables} x EmbeddingBag(sparse) + Adagrad": partial(theirs, adagrad, cycle(batches)),
    }
    if find_spec("fbgemm_gpu"):
        contestants |= _fbgemm(
            [rows_each] * num_tables, dim, [ids_BF.T.reshape(-1) for ids_BF in batches], grads_BFD.flatten(1)
        )
    timings = race(contestants, rounds, cold=cold)
    found: dict[str, Timing | float] = {**timings}
    if "fbgemm row-wise adagrad" in timings:
        ours_ms = timings["dphybrid adagrad, one flat table"].ms
        found["FBGEMM / dphybrid row-wise adagrad"] = timings["fbgemm row-wise adagrad"].ms / ours_ms
    return found


def separate_tables_costs(
    batch_size: int, rounds: int, num_tables: int = 200, rows_each: int = 10_000, dim: int = 16
) -> dict[str, Timing | float]:
    """Return ms of a row-wise Adagrad step with cold caches over many tables of one width, as separate
    modules, as a collection and as one flat table; and the ratios of CPU time to the flat table."""
    batches = [
        torch.stack([zipf_ids(rows_each, (batch_size,), seed=100 * turn + f) for f in range(num_tables)], 1)
        for turn in range(4)
    ]
    grads_BFD = torch.randn(batch_size, num_tables, dim)
    offsets_F = torch.arange(num_tables) * rows_each
    flat = HostEmbedding(num_tables * rows_each, dim, seed=0)
    collection = HostEmbeddingCollection({str(number): rows_each for number in range(num_tables)}, dim)

    def separate() -> list[HostEmbedding]:
        return [HostEmbedding(rows_each, dim, seed=0) for _ in range(num_tables)]

    def step_of(tables: list[HostEmbedding], look_up: Callable[[Tensor], Tensor]) -> Step:
        rows = row_optimizer("adagrad", {str(n): table for n, table in enumerate(tables)}, lr=0.01)
        turns = cycle(batches)

        def step() -> None:
            rows.zero_grad()
            look_up(next(turns)).backward(grads_BFD)
            rows.step()

        return step

    singly = separate()
    names = ("one flat table", "a collection", "modules, a call each")
    steps = (
        step_of([flat], lambda ids_BF: flat(ids_BF + offsets_F)),
        step_of([collection.flat], collection),
        step_of(
            singly,
            lambda ids_BF: torch.stack(
                [table(ids_B) for table, ids_B in zip(singly, ids_BF.T.contiguous(), strict=True)], 1
            ),
        ),
    )
    timings = race(dict(zip(names, steps, strict=True)), rounds, cold=True)
    of_flat = {f"{name} / {names[0]}": timings[name].cpu_ms / timings[names[0]].cpu_ms for name in names[1:]}
    return {**timings, **of_flat}


def fbgemm_tables(rows_of_tables: Sequence[int], dim: int, rule: str, lr: float = 0.01) -> Any:
    """Return FBGEMM's module for tables of these numbers of rows; its backward updates the rows. rule: sgd or
    adagrad (row-wise)."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    kinds = {
        "sgd": training.OptimType.EXACT_SGD,
        "adagrad": training.OptimType.EXACT_ROWWISE_ADAGRAD,
    }
    places = [
        (rows, dim, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU) for rows in rows_of_tables
    ]
    return training.SplitTableBatchedEmbeddingBagsCodegen(places, optimizer=kinds[rule], learning_rate=lr)


def _fbgemm(rows_of_tables: list[int], dim: int, batches: list[Tensor], grads: Tensor) -> dict[str, Step]:
    """Return steps of FBGEMM's table-batched embedding on the CPU. batches: B ids of each of T tables, table
    by table, flat. grads: (B, T * dim)."""
    # FBGEMM takes bags: here each id is a bag of its own.
    offsets = torch.arange(len(batches[0]) + 1)
    steps: dict[str, Step] = {}
    for rule, name in (("sgd", "sgd"), ("adagrad", "row-wise adagrad")):
        tables = fbgemm_tables(rows_of_tables, dim, rule)
        steps[f"fbgemm {name}"] = partial(_backward, tables, cycle(batches), offsets, grads)
    return steps


def _backward(tables: Callable[..., Tensor], turns: Iterator[Tensor], offsets: Tensor, grads: Tensor) -> None:
    tables(next(turns), offsets).backward(grads)


def size_costs(
    dim: int, num_ids: int, rounds: int, sizes: tuple[int, ...] = (100_000, 10_000_000)
) -> dict[str, float]:
    """Return ms of a row-wise Adagrad step for each table size; each step updates the same number of unique
    rows."""
    contestants: dict[str, Step] = {}
    for num_rows in sizes:
        generator = torch.Generator().manual_seed(num_rows)
        batches = [torch.randperm(num_rows, generator=generator)[:num_ids] for _ in range(4)]
        grads_ND = torch.randn(num_ids, dim)
        table = HostEmbedding(num_rows, dim, seed=0)
        rows = row_optimizer("adagrad", {"t": table}, lr=0.01)
        turns = cycle(batches)

        def step(
            table: HostEmbedding = table,
            rows: Any = rows,
            turns: Iterator[Tensor] = turns,
            grads: Tensor = grads_ND,
        ) -> None:
            rows.zero_grad()
            table(next(turns)).backward(grads)
            rows.step()

        contestants[f"{num_rows:,} rows"] = step
    return medians_ms(contestants, rounds, warm_up=8)


def run(
    threads: tuple[int, ...] = (1, 2),
    rounds: int = 15,
    scale: float = 1.0,
    log: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measure everything for each number of threads; return nested dicts of timings and ratios.

    scale: factor on table sizes and numbers of ids. log: called with a line when a part starts.
    """
    before = torch.get_num_threads()
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "freed memory stays": keep_freed_memory(),
        "load before": psutil.getloadavg()[0],  # shows whether other programs disturbed the figures
    }
    try:
        for count in threads:
            torch.set_num_threads(count)
            # torch's sparse Adagrad warns unless this is set; True would slow it down.
            with torch.sparse.check_sparse_tensor_invariants(False):
                log(f"{count} {'thread' if count == 1 else 'threads'}")
                results[f"threads={count}"] = _with_threads(rounds, scale, log)
    finally:
        torch.set_num_threads(before)
    return results | {"load after": psutil.getloadavg()[0]}


def _with_threads(rounds: int, scale: float, log: Callable[[str], object]) -> dict[str, Any]:
    rows, ids = int(1_000_000 * scale), int(53_248 * scale)
    bandwidth = copy_gib_per_s()
    results: dict[str, Any] = {"copy GiB/s": bandwidth}
    # max: tests call this with a tiny scale, and a table needs rows.
    for num_rows, dim, num_ids in ((rows, 64, ids), (max(2, rows // 5), 256, max(1, ids // 3))):
        num_unique = len(zipf_ids(num_rows, (num_ids,)).unique())
        # Bytes that a step must move: unique rows read by the lookup and the update and written once, their
        # summed gradients written, one expanded row per id written and its gradient read.
        floor_ms = 4 * dim * (3 * num_unique + 2 * num_ids + num_unique) / 2**30 / bandwidth * 1e3
        shape = f"{num_rows:,} x {dim}, {num_ids:,} Zipf(1.05) ids"
        log(shape)
        for caches in ("warm", "cold"):
            timings = step_costs(num_rows, dim, num_ids, rounds, cold=caches == "cold")
            floor = {
                "floor ms": floor_ms,
                "dphybrid adagrad / floor": timings["dphybrid adagrad"].ms / floor_ms,
            }
            results[f"{shape}, {caches} caches"] = {**timings, "ratios": {**ratios(timings), **floor}}
    for batch_size in (128, 2048):
        log(f"26 and 200 tables, batch {batch_size}")
        for caches in ("warm", "cold"):
            results[f"26 tables, batch {batch_size}, {caches} caches"] = many_tables_costs(
                batch_size, rounds, rows_each=int(100_000 * scale), cold=caches == "cold"
            )
        results[f"200 tables, batch {batch_size}"] = separate_tables_costs(
            max(1, int(batch_size * scale)), rounds, max(2, int(200 * scale)), max(2, int(10_000 * scale))
        )
    log("tables of several sizes, and steps with prefetching")
    results["by table size"] = size_costs(
        16, int(20_000 * scale), rounds, (int(100_000 * scale), int(10_000_000 * scale))
    )
    return results | pipelines(rows, 64, scale, min(9, rounds))


def ratios(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Return the slowdown of torch's sparse steps and, if installed, FBGEMM's, relative to our whole step and
    to its host's share."""
    step_ms = {name: timing.ms for name, timing in timings.items()}
    found = {}
    for name in ("sgd", "row-wise adagrad"):
        if f"fbgemm {name}" in step_ms:
            found[f"FBGEMM / dphybrid {name}"] = (
                step_ms[f"fbgemm {name}"] / step_ms[f"dphybrid {name.split()[-1]}"]
            )
    for stock, ours in (("SparseAdam", "adam"), ("Adagrad", "adagrad")):
        theirs = step_ms[f"sparse=True + {stock}"]
        found[f"{stock} / dphybrid {ours}"] = theirs / step_ms[f"dphybrid {ours}"]
        found[f"{stock} / dphybrid {ours}, host share"] = theirs / step_ms[f"dphybrid {ours}, host share"]
    return found


def text(results: Mapping[str, Any]) -> str:
    """Return the figures as text to print."""
    return f"{LEGEND}\n{table_text(results)}"


def main() -> None:
    parser = flags(__doc__, repeats=15)
    parser.add_argument(
        "--threads",
        type=at_least_one,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="numbers of threads to measure with (default: 1 2)",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on table sizes and ids (default: 1)")
    options = parser.parse_args()
    log = partial(print, file=sys.stderr, flush=True)
    results = run(tuple(options.threads), options.repeats, options.scale, log)
    show(plain(results), lambda _: text(results), options.out)


if __name__ == "__main__":
    main()
