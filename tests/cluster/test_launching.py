"""Ranks that a run starts itself: deaths, requests to stop, one record for all."""

import threading
import time
from pathlib import Path

import pytest

from dphybrid.config.settings import Settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.job import run_job
from dphybrid.run.pages import Report
from dphybrid.util.stop import Interrupted, StopRequest
from tests.cluster.launching import (
    BASE,
    LIMIT_S,
    SMALL,
    needs_torchrec,
    settings_in,
    write_clicks,
)
from tests.conftest import REPOSITORY
from tests.refusing import refused

pytestmark = [pytest.mark.nightly, needs_torchrec, pytest.mark.slow]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(REPOSITORY)
    for name in ("MORTAL_STEP", "MORTAL_SIGNAL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    write_clicks(tmp_path / "clicks.csv")
    return settings_in(tmp_path / "data")


def values(tmp_path: Path, *more: str) -> list[str]:
    own = ["model.factory=tests.cluster.mortal:build", "checkpoint.every_steps=3", "train.log_every=5"]
    return [*BASE, *SMALL, "model.dropout=0.2", f"data.path={tmp_path / 'clicks.csv'}", *own, *more]


def train(
    settings: Settings, tmp_path: Path, name: str, *more: str, stop: StopRequest | None = None
) -> Report:
    config = load_config(None, values(tmp_path, "cluster.ranks=2", *more))
    return run_job(config, settings, run_name=name, stop=stop)


def test_a_request_to_stop_ends_all_ranks_with_a_checkpoint(settings: Settings, tmp_path: Path) -> None:
    stop = StopRequest()

    def ask() -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and not list(
            settings.runs_dir.glob("asked/checkpoints/step-000003")
        ):
            time.sleep(0.05)
        stop.ask("a test")

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(Interrupted, match="stopped by a test after step") as caught:
        train(settings, tmp_path, "asked", "train.epochs=200", stop=stop)
    asking.join()
    assert caught.value.run == "asked"
    done = run_job(load_config(None, values(tmp_path, "train.epochs=4")), settings, resume="asked")
    assert done.run_name == "asked"


def test_what_the_ranks_refuse_is_told_once_and_not_tried_again(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with refused(r"step \d: the loss is nan.*: not finite"):
        train(settings, tmp_path, "nan", "table.lr=1e38", "train.lr=1e38", "train.clip_norm=0")
    assert "Resuming from" not in capfd.readouterr().out


def test_a_rank_that_stands_still_is_ended_after_the_limit(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MORTAL_STEP", "7")
    monkeypatch.setenv("MORTAL_SIGNAL", "SIGSTOP")
    limited = settings.model_copy(update={"cluster_timeout_s": 10.0})
    report = train(limited, tmp_path, "still")
    assert report.metrics["auc"] > 0
    assert "Resuming from" in capfd.readouterr().out
