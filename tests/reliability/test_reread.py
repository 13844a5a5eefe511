"""Prepared data is read once more beside a training: damage that opening it does not see ends the run."""

import os
from functools import partialmethod
from pathlib import Path

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.data import verify_prepared
from dphybrid.data.reread import Rereading
from dphybrid.recipes.configs import load_config
from dphybrid.run.train import prepare_data, run_job
from dphybrid.training.checkpoint import complete_checkpoints
from dphybrid.util.errors import UserError

OPTIONS = ["recipe=hybrid", "train.epochs=2", "train.batch_size=2000", "checkpoint.every_steps=2"]


@pytest.fixture
def damaged(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An array of prepared data, damaged as a failing disk does: its size and time stay as they were."""
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "none")
    folder = Path(prepare_data(load_config(None, OPTIONS), load_settings()))
    file = max(folder.glob("*.npy"), key=lambda path: path.stat().st_size)
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-4] ^= 1
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    verify_prepared(folder, known=True)  # finds nothing
    return file


def test_damage_ends_a_run_before_its_next_checkpoint_and_is_known_from_then_on(
    damaged: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the disk is: found when the first checkpoint asks.
    monkeypatch.setattr(Rereading, "check", partialmethod(Rereading.check, whole=True))
    with pytest.raises(UserError, match=rf"{damaged}: is damaged .* start a new run"):
        run_job(load_config(None, OPTIONS), load_settings(), run_name="run")
    assert complete_checkpoints(data_dir / "runs/run/checkpoints") == []
    with pytest.raises(UserError, match=rf"{damaged}: is damaged"):
        run_job(load_config(None, OPTIONS), load_settings(), resume="run")


def test_no_run_ends_well_before_all_is_read(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dphybrid.data.reread._REST", 1e6)  # would come to the end in days
    with pytest.raises(UserError, match=rf"{damaged}: is damaged"):
        run_job(load_config(None, OPTIONS), load_settings())


def test_a_config_may_leave_it_out(damaged: Path) -> None:
    report = run_job(load_config(None, [*OPTIONS, "train.verify_data=off"]), load_settings())
    assert report.metrics
