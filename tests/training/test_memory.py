"""A batch in parts, and a batch that does not fit: the error is injected."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dphybrid.recipes import ModelContext
from dphybrid.recipes.ctr.model import build_ctr
from dphybrid.training.parts import num_rows, parts_of
from tests.commands import run_with
from tests.preparing import clicks
from tests.refusing import refused

pytestmark = pytest.mark.usefixtures("unrecorded")
calls = [0]


def build(context: ModelContext) -> nn.Module:
    """The ctr model, out of memory in the fifth step."""
    model = build_ctr(context)

    def look(module: nn.Module, args: tuple[dict[str, torch.Tensor]]) -> None:
        calls[0] += module.training
        if calls[0] == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    model.register_forward_pre_hook(look)
    return model


def test_a_batch_that_does_not_fit_ends_the_training(data_dir: Path) -> None:
    calls[0] = 0
    values = ["model.factory=tests.training.test_memory:build", "devices=cpu*2", "train.check_split=false"]
    values += ["model.dim=4", "model.hidden=8", "train.epochs=2", "train.batch_size=64"]
    with refused(
        r"out of memory in step 5 with a batch of 64 rows: CUDA out of memory. Tried to allocate 2.00 GiB."
        r"\nLower train.batch_size or the model's sizes, or use more devices"
    ):
        run_with(*clicks(data_dir.parent), *values, run_name="run")


def test_a_check_that_does_not_fit_is_left_out(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls[0] = 4  # the comparison before the first step runs out of memory
    values = ["model.factory=tests.training.test_memory:build", "devices=cpu*2", "train.batch_size=64"]
    run_with(*clicks(data_dir.parent), *values, "train.epochs=1", run_name="run")
    assert "not compared: the first device has no memory" in capsys.readouterr().out


class Declares(nn.Module):
    whole = ("negatives_K",)


def test_a_batch_is_divided_except_for_declared_whole_tensors() -> None:
    batch = {"negatives_K": torch.arange(3), "ids_BF": torch.ones(5, 2), "user": torch.arange(5)}
    batch["scale"] = torch.tensor(2.0)
    assert num_rows(batch, Declares()) == 5
    parts = list(parts_of(batch, 2, Declares()))
    assert [len(part["ids_BF"]) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part["user"] for part in parts]), batch["user"])
    assert all(part["negatives_K"] is batch["negatives_K"] and part["scale"] == 2 for part in parts)
    assert [len(part["user"]) for part in parts_of(batch, 9, Declares())] == [1] * 5


def test_a_tensor_of_another_length_is_named_with_the_remedy() -> None:
    batch = {"image_NCHW": torch.ones(4, 1, 2, 2), "prices_USD": torch.ones(3)}
    with refused(r"train.accumulate=2: the batch's prices_USD has 3 rows, .* whole = \('prices_USD',\)"):
        list(parts_of(batch, 2, nn.Identity()))
