"""What is asked of a model before its first step: train.check_split and train.compile."""

from pathlib import Path

import pytest

from dphybrid.util.errors import UserError
from tests.commands import run_with

QUIET = ["recipe=toy", "train.epochs=1", "train.print_splits=new"]
CHECKED = [*QUIET, "train.check_split=true"]

MODELS = """
import torch
from dphybrid.parallel import DataParallel


class Supervised(torch.nn.Module):
    def __init__(self, context, dim):
        super().__init__()
        layer = torch.nn.Linear(context.info["num_inputs"], context.info["num_outputs"])
        self.region = DataParallel(torch.nn.Sequential(layer, torch.nn.Softmax(dim)), context.devices)

    def forward(self, batch):
        loss = (self.region(batch["x_BI"]) - batch["y_BO"]).square().mean(1)
        return {"loss": loss, "weight": torch.ones_like(loss)}


def across(context):
    return Supervised(context, 0)


def alone(context):
    return Supervised(context, 1)
"""


def test_a_model_that_computes_across_the_batch_does_not_train(
    unrecorded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "split_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for devices in ("cpu", "cpu*3"):
        with pytest.raises(
            UserError, match=r"(?s)first batch is not what it is when split.*region.1: its output differs"
        ):
            run_with(*CHECKED, "model.factory=split_models:across", f"devices={devices}")
    run_with(*QUIET, "model.factory=split_models:across", "devices=cpu*3")  # nobody asked
    checked = run_with(*CHECKED, "model.factory=split_models:alone", "devices=cpu*3")
    plain = run_with(*QUIET, "model.factory=split_models:alone", "devices=cpu*3")
    assert checked.metrics == plain.metrics, "the check changes no number"
    assert checked.splits == plain.splits


def test_replicas_are_not_compiled(unrecorded: None) -> None:
    with pytest.raises(UserError, match=r"compile: network runs on 2 devices"):
        run_with(*QUIET, "train.compile=true", "devices=cpu*2")
