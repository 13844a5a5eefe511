"""Shared by all tests: one torch thread, and folders of their own."""

import os
from pathlib import Path

import pytest
import torch

from dphybrid.parallel import DataParallel

REPOSITORY = Path(__file__).parent.parent
SHARED = REPOSITORY.parent / "shared"
LONG = bool(os.environ.get("DPHYBRID_LONG_TESTS"))
"""Whether the nightly forms of tests are wanted, too."""

torch.set_num_threads(1)
DataParallel.check_synchrony = True


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder for this test, and none of the caller's own settings."""
    for name in (
        "MLFLOW_TRACKING_URI",
        "DPHYBRID_TRACKING_URI",
        "DPHYBRID_DEVICES",
        "DPHYBRID_EXPERIMENT",
        "DPHYBRID_PROFILE",
    ):
        monkeypatch.setenv(name, "")  # so that what a command puts there goes with this test
        monkeypatch.delenv(name)
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("DPHYBRID_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"
