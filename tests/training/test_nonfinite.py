"""NaN and infinity: training stops before the update and says where."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dphybrid.embedding import HostEmbedding, clip_grad_norm_, row_optimizer
from dphybrid.recipes import ModelContext
from dphybrid.recipes.ctr.model import build_ctr
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.training.checkpoint import complete_checkpoints
from dphybrid.training.finite import not_finite
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import REGRESSION
from tests.commands import run_with
from tests.preparing import clicks
from tests.refusing import refused

pytestmark = pytest.mark.usefixtures("unrecorded")


def build(context: ModelContext[Any]) -> nn.Module:
    """The ctr model, whose third loss is no number."""
    model, steps = build_ctr(context), 0

    def poison(module: nn.Module, _: object, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal steps
        steps += module.training
        is_bad = module.training and steps == 3
        return outputs | {"loss": outputs["loss"] * (math.nan if is_bad else 1.0)}

    model.register_forward_hook(poison)
    return model


def build_weightless(context: ModelContext[Any]) -> nn.Module:
    model = build_ctr(context)
    model.register_forward_hook(lambda module, _, outputs: outputs | {"weight": 0 * outputs["weight"]})
    return model


def train(folder: Path, build: str) -> None:
    values = [*clicks(folder), "model.dim=4", "model.hidden=8", "devices=cpu", "train.batch_size=64"]
    values += [f"model.factory={__name__}:{build}", "checkpoint.every_steps=1"]
    run_with(*values, run_name="run")


def test_a_step_that_is_no_number_stops_before_its_update(data_dir: Path, tmp_path: Path) -> None:
    with refused(r"^step 3: the loss is nan; lower train.lr") as told:
        train(tmp_path, "build")
    good = complete_checkpoints(data_dir / "runs/run/checkpoints")[-1]
    assert good.name == "step-000002"
    assert f"last good checkpoint, {good}, with --resume" in str(told.value)
    state = model_from_checkpoint(good).state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())


def test_a_batch_without_weight_is_named_as_the_cause(tmp_path: Path) -> None:
    with refused("^step 1: the batch's weights add up to 0, so that it has no mean; lower train.lr"):
        train(tmp_path, "build_weightless")


def backward(model: nn.Module, table: HostEmbedding, factor: float = 1.0) -> torch.Tensor:
    loss: torch.Tensor = model.get_submodule("linear")(table(torch.tensor([3, 5]))).sum() * factor
    loss.backward()
    return loss.detach()


def test_the_first_tensor_that_is_no_number_is_named() -> None:
    model = nn.ModuleDict({"words": HostEmbedding(9, 2, name="words"), "linear": nn.Linear(2, 1)})
    table = model["words"]
    row_optimizer("sgd", {"words": table}, lr=0.1)
    loss = backward(model, table)
    batch = {"dense_BN": torch.tensor([[0.0], [math.inf]]), "ids_B": torch.tensor([3, 5])}
    found = not_finite(model, batch, loss, clipped=False)
    assert found == "the batch's dense_BN row 1 is inf"

    table.weight.detach()[5, 1] = math.nan
    found = not_finite(model, {}, loss, clipped=False)
    assert found == "table words row 5 is nan"

    model.zero_grad()
    with torch.no_grad():
        table.weight.detach()[5, 1] = 0.0
    loss = backward(model, table, 1e30)
    assert clip_grad_norm_(model.parameters(), 1.0) == math.inf
    found = not_finite(model, {}, loss, clipped=True)
    assert "norm is infinite" in found


class Loss(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": batch["loss_B"], "weight": torch.ones_like(batch["loss_B"])}


class Losses:
    def __len__(self) -> int:
        return 2

    def fetch(self, index_B: np.ndarray) -> dict[str, torch.Tensor]:
        return {"loss_B": torch.tensor([1.0, math.nan])[index_B]}


def test_a_sample_whose_loss_is_no_number_ends_the_evaluation() -> None:
    with refused("evaluation: the loss of sample 1 is nan; look at that sample"):
        validation_outputs(Loss(), Losses(), 2, REGRESSION)  # type: ignore[arg-type]
