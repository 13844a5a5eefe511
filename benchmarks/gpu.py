"""Each part of a step alone, whole steps with and without the pipeline, and torch's own embeddings in the
device's memory: on GPUs, or as a rehearsal on virtual devices.

Medians of turns; every turn ends when the device has. A rehearsal shows that everything runs, and nothing
about GPUs.

Letters: B samples, F id columns, N ids of a share, U unique ones, D width of a row.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import flags, show
from benchmarks.racing import race, zipf_ids
from dphybrid.embedding import HostEmbedding, RowPipeline, clip_grad_norm_, make_row_optimizer, native
from dphybrid.embedding.lookup import sort_ids
from dphybrid.embedding.replicas import DeviceRows
from dphybrid.parallel import DataParallel, Devices, parts, resolve_devices

STEPS_A_TURN = 4
"""Steps of a whole-step turn: a worker's head start from others' turns is one of them at most."""


def run(
    rounds: int,
    devices: str | None = None,
    *,
    rows_each: int = 100_000,
    columns: int = 26,
    dim: int = 64,
    batch_size: int = 8192,
) -> dict[str, Any]:
    """Return ms by devices, part and way, ratios, and what it ran on. devices: None for cuda:0 and cuda:0*4
    where there is a GPU, else a rehearsal on cpu*2."""
    on_gpu = torch.cuda.is_available() if devices is None else resolve_devices(devices).home.type == "cuda"
    wanted = [devices] if devices else ["cuda:0", "cuda:0*4"] if on_gpu else ["cpu*2"]
    batches = [
        torch.stack([zipf_ids(rows_each, (batch_size,), seed=97 * turn + f) for f in range(columns)], 1)
        + torch.arange(columns) * rows_each
        for turn in range(4)
    ]
    result: dict[str, Any] = {
        "rehearsal": not on_gpu,
        "hardware": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "shape": {"rows": rows_each * columns, "dim": dim, "batch": batch_size, "columns": columns},
        "devices": {},
    }
    for text in wanted:
        where = resolve_devices(text)
        by_part = _parts(batches[0], rows_each * columns, dim, where, rounds)
        by_way = _ways(batches, rows_each * columns, dim, where, rounds)
        ratios = {
            "off / exact": by_way["off"] / by_way["exact"],
            "parts / exact": sum(by_part.values()) / by_way["exact"],
        }
        ratios |= {f"exact / {way}": by_way["exact"] / ms for way, ms in by_way.items() if "torch" in way}
        result["devices"][text] = {"parts_ms": by_part, "step_ms": by_way, "ratios": ratios}
    return result


def text(result: dict[str, Any]) -> str:
    """Return the figures for people."""
    lines = [f"{result['hardware']}, torch {result['torch']}, {result['threads']} threads"]
    if result["rehearsal"]:
        lines.append("A rehearsal without a GPU: it shows that everything runs, and nothing about GPUs.")
    for devices, found in result["devices"].items():
        lines.append(f"\n{devices}")
        for title, unit in (("parts_ms", "ms alone"), ("step_ms", "ms a step"), ("ratios", "times")):
            lines += [f"  {name:<34}{value:10.3f} {unit}" for name, value in found[title].items()]
    return "\n".join(lines)


def _wait(where: Devices) -> None:
    for place in dict.fromkeys(where.replicas):
        if place.type == "cuda":
            torch.cuda.synchronize(place)


def _region(columns: int, dim: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(1), nn.Linear(columns * dim, 256), nn.ReLU(), nn.Linear(256, 1))


def _parts(ids_BF: Tensor, num_rows: int, dim: int, where: Devices, rounds: int) -> dict[str, float]:
    region = DataParallel(_region(ids_BF.shape[1], dim), where)

    def learn(rows_of_replicas: list[Tensor]) -> None:
        region(parts(rows_of_replicas)).square().mean().backward()

    return parts_alone(ids_BF, num_rows, dim, region, learn, rounds)


def parts_alone(
    ids_BF: Tensor,
    num_rows: int,
    dim: int,
    region: DataParallel,
    learn: Callable[[list[Tensor]], object],
    rounds: int,
) -> dict[str, float]:
    """Return ms of each part of a step by itself, of all replicas of a region together.

    learn: what the devices do with each replica's rows_bFD. Its part holds expanding rows, and summing
    gradients, of repeated ids; copies, of unique rows, wait for nothing else.
    """
    where = region.devices
    cuda = where.home.type == "cuda"
    table = HostEmbedding(num_rows, dim)
    rows = make_row_optimizer("adagrad", {"t": table}, lr=0.01)
    each = ids_BF.split(list(region.sizes(len(ids_BF))))
    shares = list(zip(each, where.replicas, strict=False))
    found = [sort_ids(ids.reshape(-1), num_rows) for ids, _ in shares]
    host = [torch.empty(len(one.unique_U), dim, pin_memory=cuda) for one in found]
    there = [torch.empty(mine.shape, device=place) for mine, (_, place) in zip(host, shares, strict=True)]
    maps = [[t.to(place) for t in one.indices()] for one, (_, place) in zip(found, shares, strict=True)]

    def device() -> None:
        leaves = [mine.detach().requires_grad_() for mine in there]
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
            table.set_row_gradients(one.unique_U, mine)
            rows.step()

    def gather() -> None:
        for one, mine in zip(found, host, strict=True):
            native.gather(table.settled(), one.unique_U, mine)

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


def _ways(batches: list[Tensor], num_rows: int, dim: int, where: Devices, rounds: int) -> dict[str, float]:
    """ms of whole steps: the pipeline off and exact, and torch's embeddings in the first device's memory."""
    columns = batches[0].shape[1]

    def source() -> Iterator[Tensor]:
        while True:
            yield from batches

    def ours(mode: str) -> Iterator[None]:
        table = HostEmbedding(num_rows, dim)
        rows = make_row_optimizer("adagrad", {"t": table}, lr=0.01)
        region = DataParallel(_region(columns, dim), where)
        table.place_on(where.replicas, region.sizes)
        dense = torch.optim.SGD(region.parameters(), lr=0.01)
        with RowPipeline({"t": table}, mode=mode, on_cpu=True) as pipeline:
            for ids_BF in pipeline.prefetch(source(), lambda ids: {"t": ids}):
                rows.zero_grad()
                dense.zero_grad()
                region(parts(table.replica_rows(ids_BF))).square().mean().backward()
                clip_grad_norm_([*region.parameters(), table.weight], 1.0)
                dense.step()
                rows.step()
                yield

    def theirs(sparse: bool) -> Iterator[None]:
        embedding = nn.Embedding(num_rows, dim, sparse=sparse).to(where.home)
        region = _region(columns, dim).to(where.home)
        dense = torch.optim.SGD(region.parameters(), lr=0.01)
        rows = torch.optim.Adagrad(embedding.parameters(), lr=0.01)
        for ids_BF in source():
            rows.zero_grad()
            dense.zero_grad()
            region(embedding(ids_BF.to(where.home))).square().mean().backward()
            dense.step()
            rows.step()
            yield

    with ExitStack() as held:
        loops = {"off": ours("off"), "exact": ours("exact"), "torch, sparse gradients": theirs(True)}
        if num_rows * dim * 4 <= 2**30:
            loops["torch, dense gradients"] = theirs(False)
        for loop in loops.values():
            held.callback(loop.close)  # type: ignore[attr-defined]

        def turn(loop: Iterator[None]) -> Callable[[], object]:
            def run_it() -> None:
                for _ in range(STEPS_A_TURN):
                    next(loop)
                _wait(where)

            return run_it

        timings = race({name: turn(loop) for name, loop in loops.items()}, rounds, warm_up=1)
    return {name: timing.ms / STEPS_A_TURN for name, timing in timings.items()}


def main(argv: list[str] | None = None) -> None:
    parser = flags(__doc__, repeats=15)
    parser.add_argument(
        "--devices",
        metavar="TEXT",
        help="where to measure (cuda:0 and cuda:0*4; without a GPU a rehearsal on cpu*2)",
    )
    options = parser.parse_args(argv)
    show(run(options.repeats, options.devices), text, options.out)


if __name__ == "__main__":
    main()
