"""Several ranks compute what one process with as many virtual devices does, and share its checkpoints."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dphybrid.config.settings import Settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import read_run
from dphybrid.run.job import evaluate_run, run_job, train_run
from dphybrid.run.pages import ResultPage
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.serving.predict import Predictor
from dphybrid.training.checkpoint import read_state
from dphybrid.util.stop import StopRequest
from tests.cluster.launching import (
    BASE,
    SMALL,
    built,
    needs_torchrec,
    settings_in,
    tensors_of,
    train_on_ranks,
)
from tests.conftest import REPOSITORY

pytestmark = [needs_torchrec, pytest.mark.slow]

# The global norm acts in the first, and its rows are bags, too; the last batch of each epoch is short.
CASES: dict[str, list[str]] = {
    "clipped": ["data.bags=genres", "table.weight_decay=0.01", "train.clip_norm=0.2"],
    "dlrm": ["model.kind=dlrm", "table.optimizer=sgd", "train.optimizer=sgd", "train.clip_norm=0"],
    "dcn": ["model.kind=dcn", "data.bags=genres", "train.schedule=linear", "train.batch_size=503"],
}
# A rank that owns no row of a batch counts towards its norm all the same.
CASES["half-used"] = ["model.factory=tests.cluster.mortal:half_used", "train.clip_norm=0.2"]
SHORT = ["train.epochs=1"]
FLAT = [*CASES["clipped"], "train.schedule=constant"]
MORTAL = ["model.factory=tests.cluster.mortal:build", "checkpoint.every_steps=3", "train.log_every=5"]
MORTAL += ["model.dropout=0.2", "cluster.ranks=2"]


def train_alone(settings: Settings, folder: str) -> None:
    run = read_run(folder, settings)
    train_run(Experiment.of(run), StopRequest())


def evaluated(folder: str, settings: Settings) -> dict[str, float]:
    run = read_run(folder, settings)
    return evaluate_run(Experiment.of(run))


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


@dataclass(frozen=True)
class Launched:
    """Runs of one launch of ranks. pairs: folders that must agree, of one process and of the ranks. spread:
    a run to go on with."""

    settings: Settings
    pairs: list[tuple[str, str]]
    spread: str
    undisturbed: str = ""


def launch(settings: Settings, size: int, cases: Sequence[str], more: Sequence[str]) -> list[tuple[str, str]]:
    """Train cases on one process, and on ranks, with more runs there in the same launch; return the pairs."""
    pairs = []
    for name in cases:
        alone = built(settings, f"{name}-alone-{size}", [*CASES[name], f"devices=cpu*{size}"])
        train_alone(settings, alone)
        pairs.append(
            (alone, built(settings, f"{name}-ranks-{size}", [*CASES[name], f"cluster.ranks={size}"]))
        )
    train_on_ranks(settings, size, [*(ranks for _, ranks in pairs), *more])
    return pairs


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """All cases on two ranks; a run that one process began; one to go on with; and one with dropout."""
    settings = settings_in(tmp_path_factory.mktemp("data"))
    # An epoch in one process, then on from there on the ranks; the learning rates are those of the whole.
    half, whole = (
        built(settings, name, [*FLAT, *values, "devices=cpu*2"])
        for name, values in (("half", SHORT), ("whole", []))
    )
    for folder in (half, whole):
        train_alone(settings, folder)
    half = built(settings, "half", [*FLAT, "cluster.ranks=2"], resume="half")
    spread = built(settings, "spread", [*FLAT, *SHORT, "cluster.ranks=2"])
    undisturbed = built(settings, "undisturbed", MORTAL)
    pairs = launch(settings, 2, list(CASES), [half, spread, undisturbed])
    return Launched(settings, [*pairs, (whole, half)], spread, undisturbed)


@pytest.fixture(scope="module")
def four(two: Launched) -> Launched:
    """Two cases on four ranks, all in the long form, and the run of two ranks, which goes on."""
    cases = list(CASES) if "DPHYBRID_LONG_TESTS" in os.environ else ["clipped", "half-used"]
    on = built(two.settings, "spread", [*FLAT, "cluster.ranks=4", "train.epochs=2"], resume="spread")
    return Launched(two.settings, launch(two.settings, 4, cases, [on]), on)


def test_two_ranks_are_as_two_virtual_devices_and_their_checkpoints_are_everyones(
    two: Launched, tmp_path: Path
) -> None:
    for alone, ranks in two.pairs:
        assert_same(alone, ranks)
    settings, clipped = two.settings, two.pairs[0][1]
    metrics = evaluated(clipped, settings)
    assert metrics["auc"] == pytest.approx(max(row["validation auc"] for row in history(clipped)), abs=1e-9)
    best = ResultPage.read(Path(clipped) / "result.json").best_checkpoint
    model = model_from_checkpoint(best, "cpu")
    assert model.table.weight.shape[1] == 8  # type: ignore[union-attr]
    done = Predictor(best).predict_file(settings.data_dir / "clicks.csv", tmp_path / "out.csv")
    assert done.num_rows == 630
    name = Path(clipped).name
    on = built(settings, name, [*CASES["clipped"], "train.epochs=4"], resume=name)
    train_alone(settings, on)
    losses = [row["train loss"] for row in history(on)]
    assert len(losses) == 4
    assert losses[3] < losses[2]


def test_a_killed_rank_goes_on_with_the_same_bits(
    two: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    recorded = settings_in(two.settings.data_dir).model_copy(
        update={"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    )
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("MORTAL_STEP", "17")
    config = load_config(None, [*BASE, *SMALL, f"data.path={two.settings.data_dir / 'clicks.csv'}", *MORTAL])
    killed = run_job(config, recorded, run_name="killed")
    assert "Resuming from" in capfd.readouterr().out
    folders = [two.settings.runs_dir / killed.run_name, Path(two.undisturbed)]
    runs = [ResultPage.read(folder / "result.json") for folder in folders]
    sums = [read_state(Path(run.checkpoint)).digests for run in runs]
    assert sums[0] == sums[1]
    assert runs[0].history == runs[1].history
    assert killed.metrics == evaluated(two.undisturbed, two.settings)
    client = mlflow.MlflowClient(recorded.tracking_uri)
    (experiment,) = client.search_experiments(filter_string="name = 'dphybrid/ctr'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["cluster.ranks"] == run.data.tags["dphybrid.ranks"] == "2"
    assert run.data.metrics["cluster/all_to_all_mib"] > 0
    rows = [run.data.metrics[f"cluster/rows_of_rank_{which}"] for which in ("max", "min")]
    assert sum(rows) == int(run.data.params["size.table_rows"])
    assert killed.devices == run.data.params["devices"] == "2 ranks on cpu"
    assert [row.device for row in killed.splits][:2] == ["rank 0", "rank 1"]


@pytest.mark.nightly
def test_four_ranks_are_as_four_virtual_devices(four: Launched) -> None:
    for alone, ranks in four.pairs:
        assert_same(alone, ranks)


@pytest.mark.nightly
def test_from_two_ranks_to_four_to_one(four: Launched) -> None:
    settings = four.settings
    alone = built(settings, "alone", [*FLAT, "devices=cpu*4"])
    train_alone(settings, alone)
    on = built(settings, "spread", FLAT, resume="spread")
    train_alone(settings, on)
    # Other splits, other roundings: as far apart as cpu*2 and cpu*4 are.
    found, expected = history(on)[-1], history(alone)[-1]
    assert found == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(
        tensors_of(on)["tables/table.safetensors:weight"],
        tensors_of(alone)["tables/table.safetensors:weight"],
        atol=1e-3,
    )
