"""The programs of examples/ run, and do what their descriptions say."""

import re
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from examples import tutorial
from examples.memory import own_decoder, row_adapter
from tests.commands import models_of, run_with
from tests.conftest import REPOSITORY


@pytest.fixture(autouse=True)
def _from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))


def test_the_tutorial_splits_trains_a_table_and_a_gan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu*3")
    torch.manual_seed(0)
    tutorial.split_a_batch()
    told = capsys.readouterr().out
    assert told.startswith("Let's use 3 devices!")
    shares = re.findall(r"In Model: input size torch.Size\(\[(\d+), 5\]\)", told)
    assert shares == ["10"] * 9 + ["4", "4", "2"]
    assert tutorial.Blocks()(torch.randn(30, 10)).shape == (30, 20)
    assert tutorial.train_a_table(num_rows=1000) < 0.01
    mean, spread = tutorial.train_a_gan()
    assert abs(mean - 3) < 0.3
    assert abs(spread - 0.5) < 0.3


def test_rows_learn_over_a_published_table_and_merge_into_it(capsys: pytest.CaptureFixture[str]) -> None:
    bits = row_adapter.main(steps=6)
    assert bits["adapted"] < bits["published"] - 0.02
    assert bits["merged"] == pytest.approx(bits["adapted"], abs=0.02)
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_the_own_decoder_learns_more_with_a_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu*2")
    means = own_decoder.main(steps=16)
    assert means["memory"] < means["plain"] - 0.05


def test_an_own_recipe_is_on_record_under_its_import_path(data_dir: Path) -> None:
    """MLflow takes neither dots nor colons in a model's name."""
    report = run_with("recipe=examples.own_recipe:Ratings", "train.epochs=1")
    run = MlflowClient(report.tracking_uri).get_run(report.run_id)
    assert run.data.params["recipe"] == "examples.own_recipe:Ratings"
    assert run.data.metrics["final_right"] == report.metrics["right"]
    (model,) = models_of(report)
    assert model.name == f"examples-own_recipe-Ratings-{Path(report.best_checkpoint).name}"
