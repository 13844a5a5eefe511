"""A decoder's step with a memory table: resident, in host memory, and mapped; its states by optimizer.

    python -m benchmarks.memory [--rows 1000000] [--mapped-gib 48] [--only lookups]

Prints how many rows a second one thread looks up, by how they are stored; for each way to hold the table, the
median time of a step and the bytes of its states; then the time of a step over a mapped table of --mapped-gib
GiB (a sparse file) beside one of a hundredth. On a GPU `benchmarks.gpu` measures what a memory adds to a step
(`overhead`).

Letters: B samples, T tokens.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SparseAdam

from benchmarks.command import flags, processor, show
from benchmarks.racing import cycle, race, race_loops, table_text
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


def resident(table: HostEmbedding) -> nn.Module:
    """Return a table of torch's with sparse gradients."""
    made = _Resident(table.num_rows, table.dim, sparse=True, _weight=table.weight.detach())
    made.name = "memory"  # type: ignore[assignment] # for the memory's messages
    return made


def batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return random (tokens, next tokens)."""
    shape = (count, BATCH_SIZE, WINDOW + 1)
    windows = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def steps(model: Model, rows: torch.optim.Optimizer | None, mode: str = "exact") -> Iterator[None]:
    """Train endlessly; yield after each step. mode: of the pipeline."""
    own = {parameter for group in (rows.param_groups if rows else []) for parameter in group["params"]}
    dense = torch.optim.AdamW([p for p in dense_parameters(model) if p not in own])
    optimizers = [dense, *([rows] if rows else [])]
    given = cycle(batches())
    with RowPipeline(model, mode=mode) if model.has_memory else nullcontext() as pipeline:
        for tokens_BT, next_BT in pipeline.prefetch(given, model.table_ids) if pipeline else given:
            model(tokens_BT, next_BT).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            yield


def published(folder: Path, train: str | None) -> Callable[[HostEmbedding], nn.Module]:
    """Return a function that makes a table mapped from FP8 files of its shape. train: of `host_tables`."""

    def hold(table: HostEmbedding) -> nn.Module:
        made: nn.Module = nn.Embedding(table.num_rows, table.dim, device="meta")
        tensors = {"weight": torch.zeros(table.num_rows, table.dim, dtype=torch.float8_e4m3fn)}
        save_file({**tensors, "weight_scale": torch.ones(1)}, folder / "model.safetensors")
        host_tables(made, 0, mapped=folder, train=train, most_rows=table.num_rows)
        return made

    return hold


def overhead(device: torch.device, rounds: int, *, rows: int, width: int) -> dict[str, float]:
    """Return the median ms of a step without a memory, and with one whose rows are in host memory, mapped
    from FP8 files ("mapped"), or trained over those ("adapted"), and are looked up in the step ("off") or
    fetched ahead ("exact"); all take turns."""
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "": Model(rows, width=width),
            "mapped ": Model(rows, published(Path(folder), None), width=width),
            "adapted ": Model(rows, published(Path(folder), "rows"), width=width),
        }
        loops = {"without": steps(Model(0, width=width).to(device), None)}
        for name, model in models.items():
            trained = name != "mapped "
            optimizer = row_optimizer("adam", model.to(device), lr=0.001) if trained else None
            loops |= {f"{name}{mode}": steps(model, optimizer, mode) for mode in ("off", "exact")}
        return race_loops(loops, rounds, torch.cuda.synchronize if device.type == "cuda" else lambda: None)


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
            ways[f"{name}, resident"] = resident = HostEmbedding(rows, dim)
            resident.weight = nn.Parameter(stored, requires_grad=False)
    ids = cycle([torch.randint(rows, (count,)) for _ in range(len(ways) * 4 + 1)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timings = race({name: partial(lambda way: way(next(ids)), way) for name, way in ways.items()}, 12, 1)
    torch.set_num_threads(threads)
    return {name: count / 1e3 / timing.ms for name, timing in timings.items()}


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
    (folder / str(rows)).mkdir()
    with (folder / str(rows) / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + rows * DIM * 4)
    table: nn.Module = nn.Embedding(rows, DIM, device="meta")
    host_tables(table, 0, mapped=folder / str(rows))
    assert isinstance(table, HostEmbedding)
    return table


def main() -> None:
    """Measure and print."""
    parser = flags(__doc__, repeats=15)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--mapped-gib", type=float, default=48.0)
    parser.add_argument("--only", choices=["lookups"])
    given = parser.parse_args()
    found: dict[str, Any] = {"processor": processor(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        found["million rows of 160 a second, one thread"] = lookups(Path(folder))
    if not given.only:
        made: dict[str, tuple[Model, torch.optim.Optimizer]] = {}
        model = Model(given.rows, resident)
        made["resident, SparseAdam"] = model, SparseAdam([model.memory.table.weight])
        for name in ("lazy-adam", "adam"):
            model = Model(given.rows)
            made[f"host, {name}"] = model, row_optimizer(name, model, lr=0.001)
        loops = {name: steps(model, rows) for name, (model, rows) in made.items()}
        found["ms a step"] = race_loops(loops, given.repeats)
        found["MiB of states"] = {name: state_bytes(rows) / 2**20 for name, (_, rows) in made.items()}
        with tempfile.TemporaryDirectory() as folder:
            loops = {
                f"mapped, {gib:.2f} GiB": steps(_mapped_model(Path(folder), gib), None)
                for gib in (given.mapped_gib / 100, given.mapped_gib)
            }
            found["ms a step"] |= race_loops(loops, given.repeats)
    show(found, table_text, given.out)


def _mapped_model(folder: Path, gib: float) -> Model:
    model = Model(4000)
    model.memory.table = mapped_table(folder, gib)
    # The hash functions of a memory of that many rows.
    model.memory._sizes_H.fill_(model.memory.table.num_rows // 4)
    model.memory._starts_H.copy_(torch.arange(4) * (model.memory.table.num_rows // 4))
    return model


if __name__ == "__main__":
    main()
