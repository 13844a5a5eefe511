"""A batch that does not fit is computed in parts, with the same result; the error is injected."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dphybrid.recipes import ModelContext
from dphybrid.recipes.ctr.model import build_ctr
from dphybrid.training.memory import micro_batches, num_rows
from dphybrid.training.tensor_file import read_tensors
from tests.commands import run_with
from tests.preparing import clicks
from tests.refusing import refused

pytestmark = pytest.mark.usefixtures("unrecorded")
fails_above = [10**9]
calls = [0]


def build(context: ModelContext) -> nn.Module:
    """The ctr model with a memory for `fails_above` rows, from the fifth step on."""
    model = build_ctr(context)

    def look(module: nn.Module, args: tuple[dict[str, torch.Tensor]]) -> None:
        calls[0] += module.training
        if module.training and calls[0] >= 5 and len(args[0]["ids_BF"]) > fails_above[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    model.register_forward_pre_hook(look)
    return model


def train(data_dir: Path, name: str, limit: int) -> dict[str, torch.Tensor]:
    fails_above[0], calls[0] = limit, 0
    values = ["model.factory=tests.training.test_memory:build", "model.dtype=float64", "devices=cpu*2"]
    values += ["model.dim=4", "model.hidden=8", "model.dropout=0", "train.epochs=2", "train.batch_size=64"]
    report = run_with(*clicks(data_dir.parent), *values, "train.clip_norm=0.5", run_name=name)
    checkpoint = Path(report.latest_checkpoint)
    table = read_tensors(checkpoint / "tables" / "table.safetensors")
    return read_tensors(checkpoint / "blocks.safetensors") | {"table": table["weight"]}


def test_a_batch_in_parts_gives_the_same_steps(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(data_dir, "whole", 10**9)
    assert "out of memory" not in capsys.readouterr().out
    parts = train(data_dir, "parts", 20)
    shown = capsys.readouterr().out
    told = "out of memory in step 5 with a batch of 64 rows: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert shown.count(told) == 1
    assert "continuing with each batch in 4 parts" in shown
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-9, atol=1e-12)
    with refused(r"out of memory in step 5 .*(?s:.)*4 parts already; lower train.batch_size"):
        train(data_dir, "none", 3)


def test_parts_of_a_batch() -> None:
    batch = {"ids_BF": torch.arange(20).view(10, 2), "labels_B": torch.arange(10)}
    batch["negatives_K"] = torch.arange(10)
    parts = list(micro_batches(batch, 4))
    assert [len(part["labels_B"]) for part in parts] == [3, 3, 3, 1]
    assert all(len(part["negatives_K"]) == 10 for part in parts)
    assert torch.equal(torch.cat([part["ids_BF"] for part in parts]), batch["ids_BF"])
    assert len(list(micro_batches({"x_B": torch.ones(2)}, 4))) == 2


def test_columns_of_any_name_are_divided() -> None:
    batch = {"catalog_VF": torch.ones(7, 2), "user_id": torch.arange(8), "price_USD": torch.ones(8)}
    batch |= {"stars": torch.ones(8), "boxes_B4": torch.ones(8, 4)}
    for part in micro_batches(batch, 4):
        assert {name: len(value) for name, value in part.items()} == dict.fromkeys(batch, 2) | {
            "catalog_VF": 7
        }
    assert num_rows(batch) == 8
    images = {"x_NCHW": torch.ones(8, 1, 2, 2), "y_N": torch.ones(8)}
    assert num_rows(images) == 8
    assert [len(part["x_NCHW"]) for part in micro_batches(images, 4)] == [2, 2, 2, 2]
