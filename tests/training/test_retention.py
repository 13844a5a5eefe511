"""Which checkpoints are written and stay: finite numbers only, the newest and the best, also in MLflow."""

from pathlib import Path

import pytest
import torch
from mlflow.store.tracking.dbmodels.models import SqlLoggedModel
from mlflow.tracking import MlflowClient
from torch import nn

import dphybrid
from dphybrid.config import CheckpointConfig
from dphybrid.config.settings import load_settings
from dphybrid.embedding import HostEmbedding, row_optimizer
from dphybrid.serving.load import find_checkpoint
from dphybrid.training.checkpoint import (
    VALIDATION,
    Progress,
    Trained,
    complete_checkpoints,
    read_state,
    step_of,
    verify_checkpoint,
)
from dphybrid.training.label_tasks import label_task
from dphybrid.training.metrics import BINARY, LANGUAGE_MODEL
from dphybrid.training.saving import CheckpointWriter, best_checkpoint, best_steps, prune_checkpoints
from tests.commands import models_of, run_with
from tests.refusing import refused
from tests.training.saving import save_checkpoint


def make(folder: Path, steps: list[int]) -> list[Path]:
    for step in steps:
        path = folder / f"step-{step:06d}"
        path.mkdir()
        (path / "state.json").write_text("{}")
    return complete_checkpoints(folder)


def test_newest_and_best_stay_beyond_six_digits_too(tmp_path: Path) -> None:
    steps = [999_970, 999_980, 999_990, 999_995, 1_000_000, 1_000_005]
    assert [step_of(path) for path in make(tmp_path, steps)] == steps
    (tmp_path / "step-1000007.damaged").mkdir()  # damaged after the newest one: it stays
    kept = prune_checkpoints(tmp_path, CheckpointConfig(keep_last=2), best=[999_980])
    assert [step_of(path) for path in kept] == [999_980, 1_000_000, 1_000_005]
    assert len(list(tmp_path.iterdir())) == 4


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = HostEmbedding(50, 4, name="words", seed=0)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))


@pytest.fixture
def trained() -> Trained:
    model = Small()
    dense = torch.optim.Adam(model.linear.parameters())
    rows = row_optimizer("adam", {"words": model.words}, lr=0.1, weight_decay=0.0)
    model.linear(model.words(torch.arange(8)).sum(0)).sum().backward()
    dense.step()
    rows.step()
    return Trained(model, dense, rows, Progress(step=3))


def test_what_is_no_number_is_never_saved(trained: Trained, tmp_path: Path) -> None:
    good, model = save_checkpoint(tmp_path, trained, {}, {}), trained.model
    trained.progress.step = 4
    moments = trained.dense.state[model.linear.bias]["exp_avg"]
    for where, values, place in (
        ("table words row 7", model.words.weight.detach(), (7, 2)),
        ("parameter linear.weight row 0", model.linear.weight.detach(), (0, 3)),
        ("optimizer's exp_avg of linear.bias row 0", moments, 0),
    ):
        before = values[place].clone()
        for value in (float("nan"), float("inf"), float("-inf")):
            values[place] = value
            with refused(rf"^{where} is not a finite number at step 4, .* {good}, with --resume"):
                save_checkpoint(tmp_path, trained, {}, {})
            assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
        values[place] = before


def test_the_same_step_again_replaces_its_folder(trained: Trained, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, trained, full_every=5) as writer:
        for auc in (0.5, 0.6):
            trained.progress.metrics["auc"] = auc
            path = writer.save({}, {})
    verify_checkpoint(path)
    assert read_state(path).progress.metrics == {"auc": 0.6}
    assert complete_checkpoints(tmp_path) == [path]


def test_best_follows_the_task_and_leaves_out_what_is_no_number() -> None:
    rows = [(1, 0.5), (2, 0.9), (3, float("nan")), (4, 0.7)]
    for task, higher, best in ((BINARY, True, [2, 4]), (LANGUAGE_MODEL, False, [1, 4])):
        progress = Progress(history=[{"step": step, f"{VALIDATION}{task.metric}": v} for step, v in rows])
        assert task.higher_is_better is higher
        assert best_steps(progress, task, 2) == best


def test_a_loss_chooses_where_the_metric_is_the_same() -> None:
    """Of few validation rows, an early epoch's accuracy is the highest there is."""
    rows = [(1, 1.0, 0.6), (2, 1.0, 0.2), (3, 0.95, 0.1), (4, 1.0, 0.1), (5, 1.0, float("nan"))]
    names = ("step", f"{VALIDATION}auc", f"{VALIDATION}log_loss")
    progress = Progress(history=[dict(zip(names, row, strict=True)) for row in rows])
    task = label_task({"label": {"name": "y", "task": "binary"}})
    assert best_steps(progress, task, 5) == [3, 4, 2, 1]


def test_the_best_of_those_that_are_there_is_taken(tmp_path: Path) -> None:
    there = make(tmp_path, [1, 2, 3, 5])
    rows = [(1, 0.5), (2, 0.7), (4, 0.9), (5, 0.6)]
    history = [{"step": step, f"{VALIDATION}{BINARY.metric}": value} for step, value in rows]
    progress = Progress(history=history, best_step=4)
    assert best_checkpoint(there, progress, BINARY) == tmp_path / "step-000002"
    assert best_checkpoint(there[2:3], progress, BINARY) == tmp_path / "step-000003"
    assert best_checkpoint([], progress, BINARY) is None


def test_what_goes_from_disk_goes_from_the_record(data_dir: Path) -> None:
    kept = ["checkpoint.every_steps=5", "checkpoint.keep_best=1", "checkpoint.keep_last=3"]
    report = run_with("recipe=hybrid", "train.epochs=3", "train.batch_size=640", *kept)
    folder = Path(report.best_checkpoint).parent
    on_disk = {step_of(path) for path in complete_checkpoints(folder)}
    assert 3 <= len(on_disk) <= 4
    roles = {int(model.name.rpartition("-")[2]): model.tags["dphybrid.role"] for model in models_of(report)}
    assert roles.keys() == on_disk
    assert "kept" in roles.values()
    assert roles[max(on_disk)].endswith("latest")
    # No epoch logs a model that is deleted soon.
    client = MlflowClient(report.tracking_uri)
    store = client._tracking_client.store
    with store.ManagedSessionMaker() as session:
        assert session.query(SqlLoggedModel).count() == len(on_disk)


def test_what_the_results_name_stays_until_there_are_others(
    data_dir: Path, unrecorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ["recipe=hybrid", "train.batch_size=1000", "checkpoint.keep_last=1", "train.patience=0"]
    best = Path(run_with(*values, "train.epochs=1", run_name="mine").best_checkpoint)

    def killed(*_: object) -> None:
        raise SystemExit

    for attempt in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr("dphybrid.run.trainer._keep_outcome", killed)
            with pytest.raises(SystemExit):
                run_with(*values, f"train.epochs={1 + 2 * attempt}", resume="mine")
        assert find_checkpoint("mine", load_settings()) == best
        assert len(complete_checkpoints(best.parent)) <= 3
        dphybrid.load_model("mine")
    report = run_with(*values, "train.epochs=6", resume="mine")
    assert Path(report.best_checkpoint) != best
    assert not best.exists()
