"""Several ranks compute what one process with as many virtual devices does, and share its checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dphybrid.config.settings import Settings
from dphybrid.jobs.load import model_from_checkpoint
from dphybrid.jobs.pages import ResultPage
from dphybrid.jobs.predict import Predictor
from dphybrid.jobs.train import evaluate_run, train_run
from dphybrid.util.stop import StopRequest
from tests.cluster.launching import built, needs_torchrec, settings_in, tensors_of, train_on_ranks

pytestmark = [needs_torchrec, pytest.mark.slow]

# The global norm acts in the first, and its rows are bags, too; the last batch of each epoch is short.
CASES: dict[str, list[str]] = {
    "clipped": ["data.bags=genres", "table.weight_decay=0.01", "train.clip_norm=0.2"],
    "dlrm": ["model.kind=dlrm", "table.optimizer=sgd", "train.optimizer=sgd", "train.clip_norm=0"],
    "deepfm": ["model.kind=deepfm", "data.bags=genres", "train.schedule=linear", "train.batch_size=503"],
}
# A rank that owns no row of a batch counts towards its norm all the same.
CASES["half-used"] = ["model.factory=tests.cluster.mortal:half_used", "train.clip_norm=0.2"]
SHORT = ["train.epochs=1"]


def train_alone(settings: Settings, folder: str) -> None:
    train_run(folder, settings, StopRequest())


def history(folder: str) -> list[dict[str, float]]:
    return ResultPage.read(Path(folder) / "result.json").history


def assert_same(one: str, other: str) -> None:
    """Losses 1e-6 relative, tables and everything else that was trained 1e-6, AUC to the last digits."""
    for expected, found in zip(history(one), history(other), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
    wanted, got = tensors_of(one), tensors_of(other)
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def compare(settings: Settings, size: int) -> None:
    """Train all cases on one process, on ranks, and from the one's checkpoint on the others."""
    folders, resumed = {}, []
    for name, values in CASES.items():
        alone = built(settings, f"{name}-alone", [*values, f"devices=cpu*{size}"])
        train_alone(settings, alone)
        folders[alone] = built(settings, f"{name}-ranks", [*values, f"cluster.ranks={size}"])
    # An epoch in one process, then on from there on the ranks; the learning rates are those of the whole.
    half = built(
        settings, "half", [*CASES["clipped"], *SHORT, "train.schedule=constant", f"devices=cpu*{size}"]
    )
    train_alone(settings, half)
    whole = built(settings, "whole", [*CASES["clipped"], "train.schedule=constant", f"devices=cpu*{size}"])
    train_alone(settings, whole)
    on = [*CASES["clipped"], "train.schedule=constant", f"cluster.ranks={size}"]
    resumed.append(built(settings, "half", on, resume="half"))
    train_on_ranks(settings, size, [*folders.values(), *resumed])
    for alone, ranks in folders.items():
        assert_same(alone, ranks)
    assert_same(whole, resumed[0])


def test_two_ranks_are_as_two_virtual_devices_and_their_checkpoints_are_everyones(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    compare(settings, 2)
    clipped = str(tmp_path / "runs/clipped-ranks")
    metrics = evaluate_run(clipped, settings)
    assert metrics["auc"] == pytest.approx(max(row["validation auc"] for row in history(clipped)), abs=1e-9)
    best = ResultPage.read(Path(clipped) / "result.json").best_checkpoint
    model = model_from_checkpoint(best, "cpu")
    assert model.table.flat.weight.shape[1] == 8  # type: ignore[union-attr]
    done = Predictor(best).predict_file(tmp_path / "clicks.csv", tmp_path / "out.csv")
    assert done.num_rows == 630
    on = built(settings, "clipped-ranks", [*CASES["clipped"], "train.epochs=4"], resume="clipped-ranks")
    train_alone(settings, on)
    losses = [row["train loss"] for row in history(on)]
    assert len(losses) == 4
    assert losses[3] < losses[2]


def test_from_two_ranks_to_four_to_one(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    flat = [*CASES["clipped"], "train.schedule=constant"]
    alone = built(settings, "alone", [*flat, "devices=cpu*4"])
    train_alone(settings, alone)
    values = [*flat, "cluster.ranks=2"]
    spread = built(settings, "spread", [*values, "train.epochs=1"])
    train_on_ranks(settings, 2, [spread])
    spread = built(settings, "spread", [*flat, "cluster.ranks=4", "train.epochs=2"], resume="spread")
    train_on_ranks(settings, 4, [spread])
    built(settings, "spread", [*flat, "train.epochs=3"], resume="spread")
    train_alone(settings, spread)
    # Other splits, other roundings: as far apart as cpu*2 and cpu*4 are.
    found, expected = history(spread)[-1], history(alone)[-1]
    assert found == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(
        tensors_of(spread)["tables/table.safetensors:weight"],
        tensors_of(alone)["tables/table.safetensors:weight"],
        atol=1e-3,
    )


def test_four_ranks_are_as_four_virtual_devices(tmp_path: Path) -> None:
    compare(settings_in(tmp_path), 4)


def test_a_page_of_ranks_names_them_and_one_of_a_process_does_not(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with_ranks, without = built(settings, "two", ["cluster.ranks=2"]), built(settings, "one", [])
    assert json.loads(Path(with_ranks, "run.json").read_text())["config"]["cluster"] == {"ranks": 2}
    assert "cluster" not in json.loads(Path(without, "run.json").read_text())["config"]
