"""NaN and infinity: training stops and says where, or skips the step as if it had not been."""

import math
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from torch import nn

from dphybrid.config.settings import load_settings
from dphybrid.embedding import HostEmbedding, clip_grad_norm_, row_optimizer
from dphybrid.parallel import DataParallel
from dphybrid.recipes import DataConfig, ModelConfig, ModelContext, Recipe
from dphybrid.recipes.configs import load_config
from dphybrid.run.pages import Report, ResultPage
from dphybrid.run.train import run_job
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.training.checkpoint import complete_checkpoints
from dphybrid.training.finite import not_finite
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
    checkpoint = {"every_steps": 2, "keep_last": 2}
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


class OnlyBad(Users):
    bad_rows = tuple(range(240))


class NetOfGoodUsers(Net):
    """The bad user's samples do not count."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counts_B = (batch["users_B"] != BAD_USER).double()
        return {name: value * counts_B for name, value in super().forward(batch).items()}


class Weightless(OnlyBad):
    def build(self, context: ModelContext[Any]) -> nn.Module:
        return NetOfGoodUsers(context)


def trained(*overrides: str, resume: str | None = None, recipe: str = "Users") -> Report:
    config = load_config(None, [f"recipe={__name__}:{recipe}", "model.dtype=float64", *overrides])
    return run_job(config, load_settings(), run_name=None if resume else "run", resume=resume)


def weights(report: Report) -> dict[str, torch.Tensor]:
    return dict(model_from_checkpoint(report.latest_checkpoint).state_dict())


@pytest.mark.parametrize("clip", ["1", "0"])
@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_a_step_that_is_no_number_stops_before_its_update_and_names_place_and_checkpoint(
    poison: str, clip: str, data_dir: Path
) -> None:
    with refused(r"^step \d+: loss: the loss is nan; .*gradient of table table row \d") as told:
        trained(f"model.poison={poison}", f"train.clip_norm={clip}")
    good = complete_checkpoints(data_dir / "runs/run/checkpoints")[-1]
    assert f"last good checkpoint, {good}, with --resume" in str(told.value)
    assert "of parameter norm.weight is nan" in str(told.value)


def test_a_resume_with_skip_goes_on_to_what_a_run_that_skips_comes_to_on_any_devices(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DPHYBRID_FACTORY_PACKAGES", "tests")  # the data folder changes below
    with refused("step"):
        trained()
    resumed = trained("train.on_nonfinite=skip", resume="run")
    told = re.findall(r"step (\d+): .*; skipped \((\d) so far\)", capsys.readouterr().out)
    assert [count for _, count in told] == ["1", "2"]  # once an epoch
    assert "2 of 20 steps were skipped" in resumed.text
    for devices in ("cpu", "cpu*8"):
        monkeypatch.setenv("DPHYBRID_DATA_DIR", str(tmp_path / devices))
        whole = trained("train.on_nonfinite=skip", f"devices={devices}")
        result = ResultPage.read(tmp_path / devices / "runs/run/result.json")
        assert result.steps_skipped == 2
        assert re.findall(r"step (\d+): .*; skipped \((\d) so far\)", "\n".join(whole.split_lines)) == told
        for name, value in weights(whole).items():
            if devices == "cpu":
                assert torch.equal(value, weights(resumed)[name]), name
            else:
                torch.testing.assert_close(value, weights(resumed)[name], rtol=1e-9, atol=1e-12)


def test_an_epoch_without_a_step_ends_training(data_dir: Path) -> None:
    with refused("epoch 1: all steps were skipped"):
        trained("train.on_nonfinite=skip", "train.batch_size=240", recipe="OnlyBad")


@pytest.mark.parametrize("clip", ["1", "0"])
def test_a_batch_without_weight_is_named_as_the_cause(clip: str, data_dir: Path) -> None:
    with refused(
        "^step 1: loss: the batch's weights add up to 0, so that it has no mean; .*on_nonfinite=skip"
    ):
        trained("model.poison=1", f"train.clip_norm={clip}", recipe="Weightless")


def test_a_skipped_step_changes_neither_blocks_nor_buffers_nor_rows_and_is_counted(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPHYBRID_TRACKING_URI")
    kept = ("checkpoint.every_steps=1", "checkpoint.keep_last=9", "checkpoint.full_every=1")
    report = trained("train.on_nonfinite=skip", "train.epochs=1", *kept)
    (bad,) = re.findall(r"step (\d+): .*; skipped", "\n".join(report.split_lines))
    folder = Path(report.latest_checkpoint).parent
    before, after = (
        {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.safetensors")}
        for path in (folder / f"step-{step:06d}" for step in (int(bad) - 1, int(bad)))
    )
    assert len(before) == 3
    assert before == after
    metrics = MlflowClient(report.tracking_uri).get_run(report.run_id).data.metrics
    assert (metrics["train/steps_skipped"], metrics["summary/steps_skipped"]) == (1, 1)


def backward(model: nn.Module, table: HostEmbedding, factor: float = 1.0) -> torch.Tensor:
    loss: torch.Tensor = model.get_submodule("linear")(table(torch.tensor([3, 5]))).sum() * factor
    loss.backward()
    return loss.detach()


def test_what_is_no_number_is_named_by_its_stage() -> None:
    model = nn.ModuleDict({"words": HostEmbedding(9, 2, name="words"), "linear": nn.Linear(2, 1)})
    table = model["words"]
    row_optimizer("sgd", {"words": table}, lr=0.1)
    loss = backward(model, table)
    batch = {"dense_BN": torch.tensor([[0.0], [math.inf]]), "ids_B": torch.tensor([3, 5])}
    found = not_finite(model, batch, loss, clipped=False)
    assert (found.text, found.weight) == ("data: dense_BN of the batch's sample 1 is inf", False)

    table.settled()[5, 1] = math.nan
    found = not_finite(model, {}, loss, clipped=False)
    assert (found.text, found.weight) == ("lookup: table words row 5 is nan", True)

    model.zero_grad()
    with torch.no_grad():
        table.settled()[5, 1] = 0.0
    loss = backward(model, table, 1e30)
    assert clip_grad_norm_(model.parameters(), 1.0) == math.inf
    found = not_finite(model, {}, loss, clipped=True)
    assert "norm is infinite" in found.text


def test_names_with_braces_are_printed_as_they_are() -> None:
    model = nn.ModuleDict({"{price}": nn.Linear(1, 1)})
    nn.init.constant_(model["{price}"].weight, math.nan)
    found = not_finite(model, {}, torch.tensor(1.0), clipped=False)
    assert found.text == "forward: parameter {price}.weight is nan"
