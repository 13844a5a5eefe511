"""Time of a table's step (lookup, backward, update), compared with torch's embeddings and, if installed,
FBGEMM's.

`run` returns the numbers, `text` formats them.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.command import flags, show
from benchmarks.racing import Step, Timing, cycle, plain, race, table_text, zipf_ids
from dphybrid.embedding.optim import row_optimizer
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.memory import keep_freed_memory
from dphybrid.util.row_rules import RULES

LEGEND = """\
Milliseconds per step: lookup, backward and update of the rows, with cold caches. Medians of interleaved
rounds; in brackets the 10th and 90th percentile, and the CPU time of all threads. "dphybrid" is a table in
host memory; "sparse=True" and "dense" are torch.nn.Embedding with the named optimizer of torch.optim. A / B
is the time of A over the time of B: above 1, B is faster.
"""
NUM_TABLES = 26
Optimizer = Callable[[Any], torch.optim.Optimizer]


def _step(
    look_up: Callable[[Tensor], Tensor], batches: list[Tensor], grads: Tensor, optimizer: Any = None
) -> Step:
    """Return a step that takes the batches in turn. optimizer: None if the backward updates the rows."""
    turns = cycle(batches)

    def step() -> None:
        if optimizer:
            optimizer.zero_grad()
        look_up(next(turns)).backward(grads)
        if optimizer:
            optimizer.step()

    return step


def _ours(rule: str, num_rows: int, dim: int, batches: list[Tensor], grads: Tensor) -> Step:
    table = HostEmbedding(num_rows, dim, seed=0)
    return _step(table, batches, grads, row_optimizer(rule, {"t": table}, lr=0.01))


def one_table(num_rows: int, dim: int, num_ids: int, rounds: int) -> dict[str, Timing]:
    """Time a step of each contestant on one table. Dense contestants take part if their table has at most 256
    MiB: a dense gradient is as large as the table, and so is each of Adam's two moments."""
    # Four batches in turn: the rows of a single one would stay in the caches.
    batches = [zipf_ids(num_rows, (num_ids,), seed=seed) for seed in range(4)]
    grads_ND = torch.randn(num_ids, dim, generator=torch.Generator().manual_seed(1))
    contestants = {f"dphybrid {rule}": _ours(rule, num_rows, dim, batches, grads_ND) for rule in RULES}
    stock: dict[str, tuple[bool, Optimizer]] = {
        "sparse=True + SGD": (True, torch.optim.SGD),
        "sparse=True + Adagrad": (True, torch.optim.Adagrad),
        "sparse=True + SparseAdam": (True, torch.optim.SparseAdam),
    }
    if num_rows * dim * 4 <= 2**28:
        stock["dense + Adam"] = (False, torch.optim.Adam)
    for name, (sparse, kind) in stock.items():
        embedding = nn.Embedding(num_rows, dim, sparse=sparse)
        contestants[name] = _step(embedding, batches, grads_ND, kind(embedding.parameters()))
    return race(contestants | _fbgemm([num_rows], dim, batches, grads_ND), rounds, cold=True)


def many_tables(batch_size: int, rounds: int, rows_each: int, dim: int = 16) -> dict[str, Timing]:
    """Time a step over 26 tables: one flat table with shifted ids, an nn.EmbeddingBag for each table, and
    FBGEMM's tables."""
    batches_BF = [
        torch.stack([zipf_ids(rows_each, (batch_size,), seed=100 * turn + f) for f in range(NUM_TABLES)], 1)
        for turn in range(4)
    ]
    grads_BFD = torch.randn(batch_size, NUM_TABLES, dim)
    flat = [ids_BF + torch.arange(NUM_TABLES) * rows_each for ids_BF in batches_BF]
    bags = nn.ModuleList(nn.EmbeddingBag(rows_each, dim, mode="sum", sparse=True) for _ in range(NUM_TABLES))

    def by_column(ids_BF: Tensor) -> Tensor:
        columns = zip(bags, ids_BF.T.contiguous(), strict=True)
        return torch.stack([bag(ids_B.unsqueeze(1)) for bag, ids_B in columns], 1)

    adagrad = torch.optim.Adagrad(bags.parameters(), lr=0.01)
    contestants = {
        "dphybrid adagrad": _ours("adagrad", NUM_TABLES * rows_each, dim, flat, grads_BFD),
        "an EmbeddingBag(sparse) each + Adagrad": _step(by_column, batches_BF, grads_BFD, adagrad),
    }
    in_order = [ids_BF.T.reshape(-1) for ids_BF in batches_BF]
    theirs = _fbgemm([rows_each] * NUM_TABLES, dim, in_order, grads_BFD.flatten(1))
    return race(contestants | theirs, rounds, cold=True)


def _fbgemm(rows_of_tables: Sequence[int], dim: int, batches: list[Tensor], grads: Tensor) -> dict[str, Step]:
    """Return a step of FBGEMM's row-wise Adagrad on the CPU, or none without FBGEMM. batches: B ids of each
    of T tables, table by table, flat. grads: (B, T * dim)."""
    if not find_spec("fbgemm_gpu"):
        return {}
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    tables = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU) for rows in rows_of_tables],
        optimizer=training.OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
    )
    offsets = torch.arange(len(batches[0]) + 1)  # FBGEMM takes bags: here each id is a bag of its own
    return {"fbgemm row-wise adagrad": _step(lambda ids: tables(ids, offsets), batches, grads)}


def ratios(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Return the slowdown of the other libraries' steps relative to ours with the same rule."""
    pairs = {"fbgemm row-wise adagrad": "adagrad", "an EmbeddingBag(sparse) each + Adagrad": "adagrad"}
    pairs |= {
        "sparse=True + Adagrad": "adagrad",
        "sparse=True + SparseAdam": "adam",
        "dense + Adam": "adam",
    }
    return {
        f"{name} / dphybrid {rule}": timings[name].ms / timings[f"dphybrid {rule}"].ms
        for name, rule in pairs.items()
        if name in timings
    }


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
                results[f"threads={count}"] = _with_threads(rounds, scale, log)
    finally:
        torch.set_num_threads(before)
    return results | {"load after": psutil.getloadavg()[0]}


def _with_threads(rounds: int, scale: float, log: Callable[[str], object]) -> dict[str, Any]:
    rows, ids = int(1_000_000 * scale), int(53_248 * scale)
    results: dict[str, Any] = {}
    # max: tests call this with a tiny scale, and a table needs rows.
    for num_rows, dim, num_ids in ((rows, 64, ids), (max(2, rows // 5), 256, max(1, ids // 3))):
        shape = f"{num_rows:,} x {dim}, {num_ids:,} Zipf(1.05) ids"
        log(shape)
        timings = one_table(num_rows, dim, num_ids, rounds)
        results[shape] = {**timings, "ratios": ratios(timings)}
    for batch_size in (128, 2048):
        log(f"{NUM_TABLES} tables, batch {batch_size}")
        timings = many_tables(batch_size, rounds, int(100_000 * scale))
        results[f"{NUM_TABLES} tables, batch {batch_size}"] = {**timings, "ratios": ratios(timings)}
    return results


def text(results: Mapping[str, Any]) -> str:
    """Return the figures as text to print."""
    return f"{LEGEND}\n{table_text(results)}"


def main() -> None:
    parser = flags(__doc__, repeats=15)
    told = "numbers of threads to measure with (default: 1 2)"
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help=told)
    options = parser.parse_args()
    log = partial(print, file=sys.stderr, flush=True)
    results = run(tuple(options.threads), options.repeats, log=log)
    show(plain(results), lambda _: text(results), options.out)


if __name__ == "__main__":
    main()
