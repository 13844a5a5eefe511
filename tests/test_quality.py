"""The recipes reach the quality that the README promises."""

from pathlib import Path

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.jobs.train import run_job
from dphybrid.recipes.configs import load_config
from tests.conftest import SHARED

ADULT = SHARED / "data" / "adult" / "adult.data"


@pytest.mark.slow
def test_text_reaches_a_perplexity_under_30(data_dir: Path) -> None:
    report = run_job(load_config(None, ["train.epochs=3", "devices=cpu"]), load_settings())
    assert report.metrics["perplexity"] < 30


@pytest.mark.slow
@pytest.mark.skipif(not ADULT.is_file(), reason="UCI Adult is not here")
def test_ctr_reaches_its_auc_on_adult(data_dir: Path) -> None:
    report = run_job(
        load_config(None, ["recipe=ctr", f"data.path={ADULT}", "data.label=14", "train.epochs=4"]),
        load_settings(),
    )
    assert report.metrics["auc"] >= 0.915
