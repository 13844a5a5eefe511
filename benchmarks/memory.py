"""A decoder's step with a memory table: resident, in host memory, and mapped; its states by optimizer.

    python -m benchmarks.memory [--rows 1000000] [--steps 20] [--mapped-gib 48] [--only lookups]

Prints how many rows a second one thread looks up, by how they are stored; for each way to hold the table, the
median time of a step (the ways take turns) and the bytes of rows and states; then the time of a step over a
mapped table of --mapped-gib GiB (a sparse file) beside one of a hundredth. On a GPU `benchmarks.gpu` measures
what a memory adds to a step (`overhead`).

Letters: B samples, T tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.command import processor
from dphybrid.embedding import (
    HostEmbedding,
    NgramMemory,
    RowPipeline,
    dense_parameters,
    host_tables,
    row_optimizer,
)

VOCABULARY, WIDTH, DIM, BATCH_SIZE, WINDOW = 4096, 128, 32, 8, 128


class _Resident(nn.Embedding):
    """torch's own table in place of a host table."""

    def forward(self, ids: Tensor, to: torch.device | None = None) -> Tensor:
        return super().forward(ids if to is None else ids.to(to))


class Model(nn.Module):
    """A memory and two layers over it. rows: 0: no memory. hold: makes the table of the memory into
    another. Tokens are on the CPU, wherever the layers are."""

    def __init__(
        self,
        rows: int,
        hold: Callable[[HostEmbedding], nn.Module] = lambda table: table,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, VOCABULARY))
        self.has_memory = rows > 0
        if self.has_memory:
            self.memory = NgramMemory(width, rows, DIM, seed=0)
            self.memory.table = hold(self.memory.table)  # type: ignore[assignment]
            nn.init.normal_(self.memory.value.weight, std=0.02)

    def table_ids(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the rows that `forward` looks up."""
        return {"memory.table": self.memory.row_ids(batch[0])}

    def forward(self, tokens_BT: Tensor, next_BT: Tensor) -> Tensor:
        device = self.tokens.weight.device
        hidden = self.tokens(tokens_BT.to(device))
        if self.has_memory:
            hidden = hidden + self.memory(hidden, tokens_BT)
        return F.cross_entropy(self.layers(hidden).flatten(0, 1), next_BT.to(device).flatten())


def resident(sparse: bool) -> Callable[[HostEmbedding], nn.Module]:
    """Return a function that makes a table of torch's. sparse: with sparse gradients."""

    def hold(table: HostEmbedding) -> nn.Module:
        made = _Resident(table.num_rows, table.dim, sparse=sparse, _weight=table.weight.detach())
        made.name = "memory"  # type: ignore[assignment] # for the memory's messages
        return made

    return hold


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return random (tokens, next tokens)."""
    windows = torch.randint(
        VOCABULARY, (steps, BATCH_SIZE, WINDOW + 1), generator=torch.Generator().manual_seed(1)
    )
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def step_ms(model: Model, rows: torch.optim.Optimizer | None, steps: int, mode: str = "exact") -> list[float]:
    """Return the milliseconds of each step after the first, fetching and waiting for the GPU included.
    mode: of the pipeline."""
    own = {parameter for group in (rows.param_groups if rows else []) for parameter in group["params"]}
    dense = torch.optim.AdamW([p for p in dense_parameters(model) if p not in own])
    optimizers = [dense, *([rows] if rows else [])]
    given, times = batches(steps + 1), []
    with RowPipeline(model, mode=mode) if model.has_memory else nullcontext() as pipeline:
        start = time.perf_counter()
        for tokens_BT, next_BT in pipeline.prefetch(given, model.table_ids) if pipeline else given:
            model(tokens_BT, next_BT).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if model.tokens.weight.is_cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            times.append(1e3 * (now - start))
            start = now
    return times[1:]


def published(folder: Path, train: str | None) -> Callable[[HostEmbedding], nn.Module]:
    """Return a function that makes a table mapped from FP8 files of its shape. train: of `host_tables`."""

    def hold(table: HostEmbedding) -> nn.Module:
        made: nn.Module = nn.Embedding(table.num_rows, table.dim, device="meta")
        tensors = {"weight": torch.zeros(table.num_rows, table.dim, dtype=torch.float8_e4m3fn)}
        save_file({**tensors, "weight_scale": torch.ones(1)}, folder / "model.safetensors")
        host_tables(made, 0, mapped=folder, train=train, most_rows=table.num_rows)
        return made

    return hold


def overhead(device: torch.device, rounds: int, steps: int, *, rows: int, width: int) -> dict[str, float]:
    """Return the median ms of a step without a memory, and with one whose rows are in host memory, mapped
    from FP8 files ("mapped"), or trained over those ("adapted"), and are looked up in the step ("off") or
    fetched ahead ("exact"); all take turns."""
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "without": Model(0, width=width),
            "": Model(rows, width=width),
            "mapped ": Model(rows, published(Path(folder), None), width=width),
            "adapted ": Model(rows, published(Path(folder), "rows"), width=width),
        }
        times: dict[str, list[float]] = {}
        optimizers = {
            name: row_optimizer("adam", models[name].to(device), lr=0.001) for name in ("", "adapted ")
        }
        for _ in range(rounds):
            for name, model in models.items():
                for mode in ("off", "exact") if model.has_memory else ("",):
                    found = step_ms(model.to(device), optimizers.get(name), steps, mode or "off")
                    times.setdefault(f"{name}{mode}", []).extend(found)
    return {name: statistics.median(found) for name, found in times.items()}


def _by_numpy(stored_bytes: Any, of_byte: Any, ids: Tensor) -> Any:
    return of_byte[np.take(stored_bytes, ids.numpy(), 0)]


def lookups(folder: Path, rows: int = 1_000_000, dim: int = 160, count: int = 16_384) -> dict[str, float]:
    """Return the million rows a second that one thread looks up in batches of `count` random ids, by how the
    rows are stored; median of 12 rounds in which all take turns, files in the page cache."""
    ways: dict[str, Callable[[Tensor], object]] = {}
    values = torch.randn(rows, dim)
    for name, dtype in (
        ("FP8", torch.float8_e4m3fn),
        ("bfloat16", torch.bfloat16),
        ("float32", torch.float32),
    ):
        (folder / name).mkdir()
        stored = values.to(dtype)
        scale = {"weight_scale": torch.tensor([0.5])} if name == "FP8" else {}
        save_file({"weight": stored, **scale}, folder / name / "model.safetensors")
        table: nn.Module = nn.Embedding(rows, dim, device="meta")
        host_tables(table, 0, mapped=folder / name)
        ways[f"{name}, mapped"] = table
        if name == "FP8":
            of_byte = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy() * 0.5
            ways["FP8, numpy: take of bytes, table of 256 values"] = partial(
                _by_numpy, stored.view(torch.uint8).numpy(), of_byte
            )
        else:
            ways[f"{name}, resident"] = HostEmbedding.from_pretrained(stored)
    threads = torch.get_num_threads()
    times: dict[str, list[float]] = {name: [] for name in ways}
    torch.set_num_threads(1)
    for _ in range(13):
        ids = torch.randint(rows, (count,))
        for name, way in ways.items():
            start = time.perf_counter()
            way(ids)
            times[name].append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return {name: count / 1e6 / statistics.median(found[1:]) for name, found in times.items()}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all states."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if isinstance(value, Tensor))


def mapped_table(folder: Path, gib: float) -> HostEmbedding:
    """Return a frozen table over a sparse safetensors file of float32: it has the size, and takes no space on
    the disk."""
    rows = int(gib * 2**30 / DIM / 4)
    entry = {"dtype": "F32", "shape": [rows, DIM], "data_offsets": [0, rows * DIM * 4]}
    header = json.dumps({"weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    file = folder / f"{rows}.safetensors"
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + rows * DIM * 4)
    table: nn.Module = nn.Embedding(rows, DIM, device="meta")
    host_tables(table, 0, mapped=file)
    assert isinstance(table, HostEmbedding)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mapped-gib", type=float, default=48.0)
    parser.add_argument("--only", choices=["lookups"])
    given = parser.parse_args()
    print(f"{processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        for name, millions in lookups(Path(folder)).items():
            print(f"{name:48} {millions:6.1f} million rows of 160 a second")
    if given.only:
        return
    made: dict[str, tuple[Model, torch.optim.Optimizer]] = {}
    for name, sparse, kind in (
        ("resident, Adam", False, torch.optim.Adam),
        ("resident, SparseAdam", True, torch.optim.SparseAdam),
    ):
        model = Model(given.rows, resident(sparse))
        made[name] = model, kind([model.memory.table.weight])
    for name in ("lazy-adam", "adam"):
        model = Model(given.rows)
        made[f"host, {name}"] = model, row_optimizer(name, model, lr=0.001)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(given.rounds):
        for name, (model, rows) in made.items():
            times[name] += step_ms(model, rows, given.steps)
    best = statistics.median(times["host, adam"])
    for name, (model, rows) in made.items():
        own, states = model.memory.table.weight.nbytes / 2**20, state_bytes(rows) / 2**20
        median = statistics.median(times[name])
        print(
            f"{name:22} {median:8.1f} ms a step ({median / best:.2f}), "
            f"rows {own:,.0f} MiB, states {states:,.0f} MiB"
        )
    with tempfile.TemporaryDirectory() as folder:
        medians = []
        for gib in (given.mapped_gib / 100, given.mapped_gib):
            model = Model(4000)
            model.memory.table = mapped_table(Path(folder), gib)
            # The hash functions of a memory of that many rows.
            model.memory._sizes_H.fill_(model.memory.table.num_rows // 4)
            model.memory._starts_H.copy_(torch.arange(4) * (model.memory.table.num_rows // 4))
            frozen = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
            medians.append(statistics.median(step_ms(model, frozen, given.steps * given.rounds)))
            print(f"mapped, {gib:6.2f} GiB      {medians[-1]:8.1f} ms a step")
        print(f"a hundred times the rows: {medians[1] / medians[0]:.2f} times the step")


if __name__ == "__main__":
    main()
