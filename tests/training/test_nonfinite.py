"""NaN and infinity: training stops before the update and says where."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from dphybrid.config.settings import load_settings
from dphybrid.embedding import HostEmbedding, clip_grad_norm_, row_optimizer
from dphybrid.parallel import DataParallel
from dphybrid.recipes import DataConfig, ModelConfig, ModelContext, Recipe
from dphybrid.recipes.configs import load_config
from dphybrid.run.job import run_job
from dphybrid.run.pages import Report
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.training.checkpoint import complete_checkpoints
from dphybrid.training.finite import not_finite
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import REGRESSION
from tests.refusing import refused

pytestmark = pytest.mark.usefixtures("unrecorded")

BAD_USER = 7


class UsersModel(ModelConfig):
    poison: Literal["nan", "inf", "1"] = "nan"


class Net(nn.Module):
    """In training, the row of one user is multiplied with the poison, and so is its gradient."""

    def __init__(self, context: ModelContext[UsersModel]) -> None:
        super().__init__()
        self.table = context.table(40, 4, name="users")
        self.norm = nn.BatchNorm1d(4)
        self.region = DataParallel(nn.Linear(4, 3), context.devices)
        self.poison = float(context.options.poison)

    def table_ids(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"table": batch["users_B"]}

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows_BD = self.table(batch["users_B"])
        if self.training:
            factor_B = torch.where(batch["users_B"] == BAD_USER, self.poison, 1.0).to(rows_BD)
            rows_BD = rows_BD * factor_B.unsqueeze(1)
        error_B = self.region(self.norm(rows_BD)).mean(1) - batch["labels_B"]
        return {"loss": error_B.square(), "weight": torch.ones_like(error_B)}


class Users(Recipe):
    name = "users"
    summary = "Made-up labels of users."
    model = UsersModel
    train = {"epochs": 2, "batch_size": 24, "lr": 0.01, "patience": 0, "log_every": 2}
    bad_rows = (102,)

    def rows(self, data: DataConfig, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        random = np.random.default_rng(seed)
        split = []
        for count in (240, 48):
            users_B = random.integers(0, 40, count)
            users_B[users_B == BAD_USER] = 8
            if count == 240:
                users_B[[*self.bad_rows]] = BAD_USER
            split.append({"users_B": users_B, "labels_B": random.normal(size=count).astype(np.float32)})
        return split[0], split[1]

    def build(self, context: ModelContext[Any]) -> nn.Module:
        return Net(context)

    def task(self, info: object) -> Any:
        return REGRESSION


class NetOfGoodUsers(Net):
    """The bad user's samples do not count."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counts_B = (batch["users_B"] != BAD_USER).double()
        return {name: value * counts_B for name, value in super().forward(batch).items()}


class Weightless(Users):
    bad_rows = tuple(range(240))

    def build(self, context: ModelContext[Any]) -> nn.Module:
        return NetOfGoodUsers(context)


def trained(*overrides: str, resume: str | None = None, recipe: str = "Users") -> Report:
    values = [f"recipe={__name__}:{recipe}", "model.dtype=float64", "checkpoint.every_steps=2", *overrides]
    config = load_config(None, values)
    return run_job(config, load_settings(), run_name=None if resume else "run", resume=resume)


def weights(report: Report) -> dict[str, torch.Tensor]:
    return dict(model_from_checkpoint(report.latest_checkpoint).state_dict())


@pytest.mark.parametrize(("poison", "clip"), [("nan", "1"), ("inf", "0")])
def test_a_step_that_is_no_number_stops_before_its_update_and_names_place_and_checkpoint(
    poison: str, clip: str, data_dir: Path
) -> None:
    with refused(r"^step \d+: the loss is nan; lower train.lr") as told:
        trained(f"model.poison={poison}", f"train.clip_norm={clip}")
    good = complete_checkpoints(data_dir / "runs/run/checkpoints")[-1]
    assert f"last good checkpoint, {good}, with --resume" in str(told.value)


def test_a_batch_without_weight_is_named_as_the_cause(data_dir: Path) -> None:
    with refused("^step 1: the batch's weights add up to 0, so that it has no mean; lower train.lr"):
        trained("model.poison=1", recipe="Weightless")


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


def test_names_with_braces_are_printed_as_they_are() -> None:
    model = nn.ModuleDict({"{price}": nn.Linear(1, 1)})
    nn.init.constant_(model["{price}"].weight, math.nan)
    found = not_finite(model, {}, torch.tensor(1.0), clipped=False)
    assert found == "parameter {price}.weight row 0 is nan"


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
