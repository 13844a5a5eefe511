"""Which checkpoints stay: newest and best, on disk and in MLflow alike."""

from pathlib import Path

import pytest
from mlflow.store.tracking.dbmodels.models import SqlLoggedModel
from mlflow.tracking import MlflowClient

import dphybrid
from dphybrid.config import CheckpointConfig
from dphybrid.config.settings import load_settings
from dphybrid.serving.load import find_checkpoint
from dphybrid.training.checkpoint import VALIDATION, Progress, complete_checkpoints, step_of
from dphybrid.training.label_tasks import label_task
from dphybrid.training.metrics import BINARY, LANGUAGE_MODEL
from dphybrid.training.saving import best_checkpoint, best_steps, prune_checkpoints
from tests.commands import models_of, run_with


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
