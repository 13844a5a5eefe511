"""What is asked of a model before its first step: train.check_split and train.compile."""

from pathlib import Path

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.train import Report, run_job
from dphybrid.util.errors import UserError

QUIET = ["recipe=toy", "train.epochs=1", "train.print_splits=new"]

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


def train(*overrides: str) -> Report:
    settings = load_settings().model_copy(update={"tracking_uri": "none"})
    return run_job(load_config(None, [*QUIET, *overrides]), settings)


def test_a_model_that_computes_across_the_batch_does_not_train(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "split_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for devices in ("cpu", "cpu*3"):
        with pytest.raises(
            UserError, match=r"(?s)first batch is not what it is when split.*region.1: its output differs"
        ):
            train("model.factory=split_models:across", "train.check_split=true", f"devices={devices}")
    train("model.factory=split_models:across", "devices=cpu*3")  # nobody asked
    checked = train("model.factory=split_models:alone", "train.check_split=true", "devices=cpu*3")
    plain = train("model.factory=split_models:alone", "devices=cpu*3")
    assert checked.metrics == plain.metrics, "the check changes no number"
    assert checked.splits == plain.splits


def test_replicas_are_not_compiled(data_dir: Path) -> None:
    with pytest.raises(UserError, match=r"compile: network runs on 2 devices"):
        train("train.compile=true", "devices=cpu*2")
