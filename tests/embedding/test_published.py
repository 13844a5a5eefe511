"""Tables of published checkpoints, in every layout, and rows trained over them as in a resident table."""

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dphybrid.embedding import (
    HostEmbedding,
    RowPipeline,
    clip_grad_norm_,
    dense_parameters,
    host_tables,
    load_rows,
    merge_rows,
    row_optimizer,
    save_rows,
)
from dphybrid.parallel import DataParallel
from dphybrid.util.errors import UserError
from tests.conftest import REPOSITORY

ROWS, DIM, PADDING = 300, 64, 7
FORMATS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}


def write(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Write a checkpoint of several files."""
    for file, tensors in files.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def drawn(dtype: torch.dtype, rows: int = ROWS, dim: int = DIM) -> Tensor:
    """Return random rows; of small types, every finite value."""
    random = torch.Generator().manual_seed(0)
    if dtype.itemsize == 1:
        codes = torch.arange(rows * dim, dtype=torch.int64).remainder(254).view(rows, dim)
        return torch.where(codes < 127, codes, codes + 1).to(torch.uint8).view(dtype)
    if dtype is torch.float16:
        codes = torch.randint(-(2**15), 2**15, (rows, dim), generator=random).short()
        codes[codes & 0x7C00 == 0x7C00] = 0  # infinity and NaN
        return codes.view(dtype)
    return torch.randn(rows, dim, generator=random).to(dtype)


def scale_of(kind: str | None) -> Tensor | None:
    random = torch.Generator().manual_seed(1)
    if kind == "block":
        exponents = torch.randint(100, 140, (ROWS, DIM // 32), generator=random)
        exponents[0] = torch.tensor([0, 254])
        return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    if kind == "row":
        return torch.rand(ROWS, 1, generator=random)
    return None if kind is None else torch.tensor([0.037]).to(FORMATS[kind])


def values_of(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Return what torch makes of the stored rows."""
    if scale is None:
        return rows.float()
    factors = scale.float()
    return rows.float() * (
        factors if factors.numel() == 1 else factors.repeat_interleave(DIM // factors.shape[1], 1)
    )


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, DIM, padding_idx=PADDING, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.rows(ids)
        return found


def on_meta(dtype: torch.dtype = torch.float32) -> Model:
    with torch.device("meta"):
        return Model(dtype)


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(
    ("kind", "scale"),
    [(kind, None) for kind in ("F32", "BF16", "F16")]
    + [("F8_E4M3", scale) for scale in ("F32", "BF16", "row", "block")],
)
def test_rows_are_those_of_torch_s_own_conversion(
    tmp_path: Path, kind: str, scale: str | None, pieces: int
) -> None:
    rows, factors = drawn(FORMATS[kind]), scale_of(scale)
    names = ["rows.weight"] if pieces == 1 else [f"rows.shard_{number}.weight" for number in range(pieces)]
    parts = rows.split([ROWS] if pieces == 1 else [100, 1, 150, 49])
    files = {
        f"{n}.safetensors": {name: part} for n, (name, part) in enumerate(zip(names, parts, strict=True))
    }
    if factors is not None:
        files["scales.safetensors"] = {"rows.weight_scale": factors}
    checkpoint = write(tmp_path, files)
    ids = torch.randint(ROWS, (50, 8))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = on_meta(dtype)
        assert host_tables(model, 1000, mapped=checkpoint) == ["rows"]
        wanted = values_of(rows, factors).to(dtype)[ids]
        for each in (model, copy.deepcopy(model)):
            assert torch.equal(each(ids), wanted)
        assert not model.state_dict()
    with pytest.raises(UserError, match=f"id {ROWS} at position"):
        model(torch.tensor([ROWS]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows.shard_1.weight": None}, "has no tensor 'rows.shard_1.weight'"),
        ({"rows.shard_2.weight": None}, r"shape \(200, 64\) in 2 pieces, but the model's is \(300, 64\)"),
        (
            {"rows.shard_1.weight": torch.zeros(100, 32, dtype=torch.uint8)},
            "shard_1.weight is .* of U8",
        ),
        ({"rows.shard_1.weight": torch.zeros(100, 64)}, r"shard_1.weight is \(100, 64\) of F32"),
        (
            {"rows.shard_1.weight": torch.zeros(100, 32).to(torch.float8_e4m3fn)},
            r"rows.shard_1.weight is \(100, 32\) of F8_E4M3",
        ),
        ({"rows.weight_scale": None}, "without rows.weight_scale"),
        ({"rows.weight_scale": torch.ones(300, 4)}, r"rows.weight_scale is \(300, 4\) of F32"),
        ({"rows.weight_scale": torch.ones(300, dtype=torch.int8)}, "of I8; use one value"),
        ({"rows.weight_scale_2": torch.ones(1)}, "has 'rows.weight_scale_2'"),
    ],
)
def test_refuses_by_name_what_cannot_be_mapped(
    tmp_path: Path, change: dict[str, Tensor | None], told: str
) -> None:
    parts = drawn(torch.float8_e4m3fn).split(100)
    tensors: dict[str, Any] = {f"rows.shard_{number}.weight": part for number, part in enumerate(parts)}
    tensors |= {"rows.weight_scale": torch.ones(1)} | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    model = on_meta()
    weight = model.rows.weight
    with pytest.raises(UserError, match=told):
        host_tables(model, 0, mapped=write(tmp_path, {"a.safetensors": kept}), train="rows")
    assert model.rows.weight is weight
    assert type(model.rows) is nn.Embedding


def test_a_table_larger_than_memory_takes_that_of_its_used_pages(tmp_path: Path) -> None:
    dim = 1024
    rows = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dim
    size = rows * dim
    entries: dict[str, Any] = {
        f"shard_{n}.weight": {
            "dtype": "F8_E4M3",
            "shape": [rows, dim],
            "data_offsets": [n * size, (n + 1) * size],
        }
        for n in range(2)  # pieces
    }
    entries["weight_scale"] = {"dtype": "F32", "shape": [1], "data_offsets": [2 * size, 2 * size + 4]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 2 * size + 4)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    table: Any = nn.Embedding(2 * rows, dim, device="meta")
    host_tables(table, mapped=tmp_path, train="rows", most_rows=1000)
    ids = torch.randint(2 * rows, (500,))
    assert not table(ids).any()
    assert resident() - before < 2**30


RULES = ("adam", "adagrad")


def made(folder: Path, rule: str, devices: str) -> tuple[nn.Module, HostEmbedding, torch.optim.Optimizer]:
    """Return a region whose table trains over a file, its table, and the rows' optimizer."""
    model = on_meta()
    host_tables(model, 0, mapped=folder, train="rows", most_rows=ROWS - 20)
    region = DataParallel(model, devices)
    table: Any = model.rows
    return region, table, row_optimizer(rule, region, lr=0.05, weight_decay=0.01)


def resident(
    values: Tensor, rule: str, devices: str
) -> tuple[nn.Module, HostEmbedding, torch.optim.Optimizer]:
    model = nn.Module.__new__(Model)
    nn.Module.__init__(model)
    model.rows = HostEmbedding(*values.shape, padding_idx=PADDING)
    model.rows.weight = nn.Parameter(values.clone())
    region = DataParallel(model, devices)
    return region, model.rows, row_optimizer(rule, region, lr=0.05, weight_decay=0.01)


def train(
    region: nn.Module,
    table: HostEmbedding,
    rows: torch.optim.Optimizer,
    steps: range = range(8),
    mode: str = "off",
    state: Path | None = None,
    die_at: int | None = None,
) -> list[float]:
    """Train; return the losses. state: where to save each step, or, if it is there, to continue from."""
    if state is not None and state.exists():
        saved = torch.load(state)
        region.load_state_dict(saved["model"])
        rows.load_state_dict(saved["rows"])
    random = torch.Generator().manual_seed(2)
    batches = [(torch.rand(6, 9, generator=random).pow(2) * (ROWS - 40)).long() for _ in range(steps.stop)]
    batches[0][0, 0] = PADDING
    losses = []
    with RowPipeline(region, mode=mode, on_cpu=True) as pipeline:
        for step, ids in enumerate(
            pipeline.prefetch(batches[steps.start :], lambda ids: {"module.rows": ids}), steps.start
        ):
            loss = (region(ids) - step).square().mean()
            loss.backward()
            clip_grad_norm_(table.weight, 0.05)
            rows.step()
            rows.zero_grad()
            losses.append(loss.item())
            if state is not None:
                torch.save({"model": region.state_dict(), "rows": rows.state_dict()}, state)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        if mode == "exact" and len(region.devices) > 1:
            assert pipeline.counters()["prepared"] > 0
    return losses


def published(folder: Path) -> tuple[Path, Tensor]:
    """Write a table of FP8 in pieces; return it and its values."""
    rows = (torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3)) * 8).to(torch.float8_e4m3fn)
    files = {f"{n}.safetensors": {f"rows.shard_{n}.weight": part} for n, part in enumerate(rows.split(80))}
    files["0.safetensors"]["rows.weight_scale"] = scale = torch.tensor([0.037])
    return write(folder, files), rows.float() * scale


@pytest.mark.parametrize("train", [None, "rows"])
def test_an_evaluation_fetched_ahead_trains_no_rows(tmp_path: Path, train: str | None) -> None:
    checkpoint, values = published(tmp_path)
    model = on_meta()
    host_tables(model, 0, mapped=checkpoint, train=train)
    region, batches = DataParallel(model, "cpu*2"), list(torch.randint(ROWS, (3, 6, 9)))
    with torch.set_grad_enabled(train is None), RowPipeline(region, on_cpu=True) as pipeline:
        for ids in pipeline.prefetch(batches, lambda ids: {"module.rows": ids}):
            assert torch.equal(region(ids), values[ids])
        assert (pipeline.counters()["prepared"] > 0) == (train is None)
    trained = [ids.tolist() for key, ids in region.state_dict().items() if key.endswith("trained_ids")]
    assert trained == ([[PADDING]] if train else [])
    assert model.rows.num_rows == ROWS


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
@pytest.mark.parametrize("rule", RULES)
def test_rows_train_over_a_file_to_the_bits_of_a_resident_table(
    tmp_path: Path, rule: str, devices: str
) -> None:
    checkpoint, values = published(tmp_path)
    wanted = resident(values, rule, devices)
    losses = train(*wanted)
    for mode in ("off", "exact"):
        region, table, rows = made(checkpoint, rule, devices)
        assert train(region, table, rows, mode=mode) == losses
        with torch.no_grad():
            every = torch.arange(ROWS)
            assert torch.equal(region(every), wanted[0](every))
            assert torch.equal(copy.deepcopy(table)(every), table(every))
    assert torch.equal(wanted[1].weight[PADDING], values[PADDING])


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    checkpoint, values = published(tmp_path)
    state = tmp_path / "state"
    code = (
        "from pathlib import Path; from tests.embedding.test_published import made, train; "
        f"train(*made(Path({str(checkpoint)!r}), 'adam', 'cpu*2'), state=Path({str(state)!r}), die_at=4)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    assert ended.returncode == -signal.SIGKILL
    wanted = resident(values, "adam", "cpu*2")
    losses = train(*wanted)
    again = made(checkpoint, "adam", "cpu*2")
    assert train(*again, steps=range(5, 8), state=state) == losses[5:]
    with torch.no_grad():
        assert torch.equal(again[0](torch.arange(ROWS)), wanted[0](torch.arange(ROWS)))


def test_more_rows_than_there_is_room_for_are_refused_before_the_step(tmp_path: Path) -> None:
    checkpoint, _ = published(tmp_path)
    region, table, rows = made(checkpoint, "adam", "cpu")
    train(region, table, rows)
    before = copy.deepcopy(region.state_dict())
    with pytest.raises(UserError, match="300 rows would be trained, but most_rows is 280"):
        region(torch.arange(ROWS))
    assert all(torch.equal(value, before[key]) for key, value in region.state_dict().items())
    table.weight.requires_grad_(False)
    assert region(torch.arange(ROWS)).shape == (ROWS, DIM)
    for options in ({"train": "all"}, {"most_rows": 0}):
        with pytest.raises(UserError, match="host_tables: mapped="):
            host_tables(on_meta(), 0, mapped=checkpoint, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="with a checkpoint to map"):
        host_tables(Model(), 0, train="rows")


def test_states_of_another_table_are_refused(tmp_path: Path) -> None:
    checkpoint, _ = published(tmp_path)
    frozen, adapted = on_meta(), on_meta()
    host_tables(frozen, 0, mapped=checkpoint)
    host_tables(adapted, 0, mapped=checkpoint, train="rows")
    assert list(adapted.state_dict()) == ["rows.trained_ids", "rows.trained_rows"]
    with pytest.raises(RuntimeError, match="Unexpected key.*rows.weight"):
        frozen.load_state_dict({"rows.weight": torch.zeros(ROWS, DIM)})
    with pytest.raises(RuntimeError, match="Missing key.*trained_ids"):
        adapted.load_state_dict({})
    for ids, rows in ((torch.tensor([1, 1]), torch.zeros(2, DIM)), (torch.tensor([1]), torch.zeros(1, 3))):
        with pytest.raises(UserError, match="numbers of rows; give as many"):
            adapted.load_state_dict({"rows.trained_ids": ids, "rows.trained_rows": rows})
    assert not list(dense_parameters(adapted))


def test_embeddings_that_share_a_table_share_its_trained_rows(tmp_path: Path) -> None:
    checkpoint, values = published(tmp_path)
    with torch.device("meta"):
        model = nn.ModuleDict({"rows": nn.Embedding(ROWS, DIM), "decoder": nn.Embedding(ROWS, DIM)})
    model["decoder"].weight = model["rows"].weight
    assert host_tables(model, 0, mapped=checkpoint, train="rows") == ["rows", "decoder"]
    (model["decoder"](torch.tensor([1])).sum() + model["rows"](torch.tensor([1, 2])).sum()).backward()
    optimizer = row_optimizer("sgd", model, lr=1.0)
    optimizer.step()
    with torch.no_grad():
        for table in model.values():
            assert torch.equal(
                table(torch.tensor([1, 2, 3])), values[1:4] - torch.tensor([[2.0], [1.0], [0.0]])
            )


@pytest.mark.parametrize(
    ("kind", "scale"), [("F32", None), ("BF16", None), *(("F8_E4M3", s) for s in ("F32", "row", "block"))]
)
def test_trained_rows_are_saved_loaded_and_merged(tmp_path: Path, kind: str, scale: str | None) -> None:
    (folder := tmp_path / "checkpoint").mkdir()
    rows, factors = (20 * drawn(torch.float32)).to(FORMATS[kind]), scale_of(scale)
    if scale == "block":
        assert factors is not None
        factors.view(torch.uint8)[:] = 120
    files = {f"{n}.safetensors": {f"rows.shard_{n}.weight": part} for n, part in enumerate(rows.split(100))}
    if factors is not None:
        files["0.safetensors"]["rows.weight_scale"] = factors
    (write(folder, files) / "config.json").write_text("{}")
    model = on_meta()
    host_tables(model, 0, mapped=folder, train="rows")
    with torch.no_grad():
        values = model(torch.arange(ROWS))
    optimizer, touched = row_optimizer("sgd", model, lr=0.01), torch.tensor([3, 250, 9])
    (model(touched) * torch.randn(3, DIM)).sum().backward()
    optimizer.step()
    save_rows(model, tmp_path / "rows.safetensors")
    again = on_meta()
    host_tables(again, 0, mapped=folder, train="rows")
    load_rows(again, tmp_path / "rows.safetensors")
    with torch.no_grad():
        trained = model(torch.arange(ROWS))
        assert torch.equal(again(torch.arange(ROWS)), trained)
    merge_rows(folder, tmp_path / "rows.safetensors", tmp_path / "out")
    merged = on_meta()
    host_tables(merged, 0, mapped=tmp_path / "out")
    found = merged(torch.arange(ROWS))
    others = torch.ones(ROWS, dtype=torch.bool).index_fill_(0, touched, False)
    assert torch.equal(found[others], values[others])
    step = {"F32": 0.0, "BF16": 2**-8, "F8_E4M3": 2**-4}[kind]
    largest = values_of(torch.full_like(rows, 2**-9), factors)[touched] if kind == "F8_E4M3" else 0.0
    assert bool(((found - trained)[touched].abs() <= step * trained[touched].abs() + largest).all())
    linked = [(tmp_path / "out" / file.name).samefile(file) for file in sorted(folder.iterdir())]
    assert linked == [False, True, False, True]
    with pytest.raises(UserError, match="exists"):
        merge_rows(folder, tmp_path / "rows.safetensors", tmp_path / "out")


def test_rows_that_do_not_fit_their_scale_are_reported(tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoint").mkdir()
    published(folder)
    file = tmp_path / "rows.safetensors"
    save_file(
        {
            "rows.ids": torch.tensor([4, 8]),
            "rows.rows": torch.tensor([[100.0], [1.0]]).expand(2, DIM).clone(),
        },
        file,
    )
    with pytest.warns(UserWarning, match="1 rows of rows, such as 4, have values larger"):
        merge_rows(folder, file, tmp_path / "out")
    model = on_meta()
    host_tables(model, 0, mapped=tmp_path / "out")
    assert torch.equal(model(torch.tensor([4])), torch.full((1, DIM), 448 * torch.tensor(0.037).item()))
    for tensors, told in (
        ({"rows.ids": torch.tensor([ROWS]), "rows.rows": torch.ones(1, DIM)}, f"id {ROWS} at position"),
        ({"rows.ids": torch.tensor([1]), "rows.rows": torch.full((1, DIM), torch.inf)}, "not finite"),
        ({"a.ids": torch.tensor([1]), "a.rows": torch.ones(1, DIM)}, "has no tensor 'a.weight'"),
        ({"rows.ids": torch.tensor([1])}, "does not hold row numbers and rows"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=told):
            merge_rows(folder, file, tmp_path / "other")
        assert not (tmp_path / "other").exists()
    for model in (Model(), on_meta()):
        with pytest.raises(UserError, match="there are no trained rows"):
            save_rows(model, file)
    host_tables(model, 0, mapped=folder, train="rows")
    save_file({"a.ids": torch.tensor([1]), "a.rows": torch.ones(1, DIM)}, file)
    with pytest.raises(UserError, match="has rows of a, the model trains those of rows"):
        load_rows(model, file)
