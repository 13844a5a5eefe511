"""Folders written before pages had a version still open."""

import shutil
from pathlib import Path

import pytest
import torch

from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.folder import read_run
from dphybrid.run.train import run_job
from dphybrid.serving.load import find_checkpoint, load_model
from dphybrid.serving.predict import Predictor
from dphybrid.training.checkpoint import read_state

FIXTURE = Path(__file__).parent.parent / "fixtures" / "run_without_version"
OPTIONS = [
    "recipe=ctr",
    "data.label=clicked",
    "data.buckets=4",
    "model.dim=2",
    "model.hidden=4",
    "model.layers=1",
    "train.batch_size=16",
    "devices=cpu*2",
    "checkpoint.keep_last=1",
    "data.missing=?,NA,NaN,null",
]


@pytest.fixture
def old_run(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder, in this test's data folder."""
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "none")
    for name in ("prepared", "runs"):
        shutil.copytree(FIXTURE / name, data_dir / name)
    shutil.copyfile(FIXTURE / "clicks.csv", tmp_path / "clicks.csv")
    for page in data_dir.rglob("*.json"):
        page.write_text(page.read_text().replace("@ROOT@", str(tmp_path)))
    return data_dir / "runs" / "old"


def test_a_run_without_versions_is_loaded_and_predicts(old_run: Path) -> None:
    assert read_run(old_run).page.version == 0
    assert find_checkpoint("old", load_settings()).name == "step-000003"
    assert sum(weight.numel() for weight in load_model("old").state_dict().values()) == 11 * 2 + 23
    scores = Predictor(old_run / "checkpoints" / "step-000006").predict(
        {"age": [30, 70], "city": ["a", "nowhere"]}
    )
    # that version's answer
    assert scores.tolist() == pytest.approx([0.27502405643463135, 0.6734785437583923], abs=1e-6)


def test_a_run_without_versions_goes_on(old_run: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    report = run_job(
        load_config(None, [*OPTIONS, f"data.path={tmp_path / 'clicks.csv'}", "train.epochs=3"]),
        load_settings(),
        resume="old",
    )
    assert report.run_name == "old"
    state = read_state(Path(report.latest_checkpoint))
    assert (state.progress.step, state.progress.epoch, state.version) == (9, 3, 1)
    assert [row["step"] for row in state.progress.history] == [3, 6, 9]
    assert all(
        row.keys() == {"step", "train loss", "validation auc", "validation log_loss"}
        for row in state.progress.history
    )
    assert read_run(old_run).page.version == 1
    torch.set_rng_state(before)
