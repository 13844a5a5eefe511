"""A batch that does not fit ends the training with a report; the error is injected."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dphybrid.recipes import ModelContext
from dphybrid.recipes.ctr.model import build_ctr
from dphybrid.training.memory import num_rows
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


def test_a_batch_that_does_not_fit_ends_the_training_with_a_report(data_dir: Path) -> None:
    calls[0] = 0
    values = ["model.factory=tests.training.test_memory:build", "devices=cpu*2", "train.check_split=false"]
    values += ["model.dim=4", "model.hidden=8", "train.epochs=2", "train.batch_size=64"]
    with refused(
        r"out of memory in step 5 with a batch of 64 rows: CUDA out of memory. Tried to allocate 2.00 GiB."
        r"(?s:.)*activations and replicas.*\nLower train.batch_size or the model's sizes, or use more devices"
    ):
        run_with(*clicks(data_dir.parent), *values, run_name="run")


def test_a_check_that_does_not_fit_is_left_out(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls[0] = 4  # the comparison before the first step runs out of memory
    values = ["model.factory=tests.training.test_memory:build", "devices=cpu*2", "train.batch_size=64"]
    run_with(*clicks(data_dir.parent), *values, "train.epochs=1", run_name="run")
    assert "not compared, as the first device cannot hold the whole batch" in capsys.readouterr().out


def test_rows_of_a_batch() -> None:
    assert num_rows({"ids_BF": torch.ones(10, 2), "negatives_K": torch.ones(7)}) == 10
    assert num_rows({"negatives_K": torch.ones(7), "user_id": torch.ones(3)}) == 3
    assert num_rows({"price_USD": torch.ones(3), "x_B": torch.ones(3)}) == 3
    assert num_rows({"x_NCHW": torch.ones(8, 1, 2, 2), "y_N": torch.ones(8)}) == 8
