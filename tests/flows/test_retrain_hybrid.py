"""Retraining as data arrives, in this process on a temporary server, with MLflow's embedded store."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.data import open_prepared
from dphybrid.lifecycle.champion import Decision, compared, open_registry
from dphybrid.recipes.configs import build_config
from dphybrid.run.folder import read_run
from dphybrid.training.metrics import BINARY, REGRESSION
from dphybrid.util.stop import StopRequest
from flows.retrain_hybrid import main, retrain_hybrid


@pytest.fixture(autouse=True)
def _soon_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dphybrid.lifecycle.champion._NUM_RESAMPLES", 50)


def write_day(folder: Path, day: int, sites: range) -> None:
    """Clicks of a day: sites with even numbers have a high rate."""
    random = np.random.default_rng(day)
    site = random.integers(sites.start, sites.stop, 2000)
    age = random.normal(40, 15, 2000).round(6)
    rate = np.where(site % 2 == 0, 0.85, 0.15)
    clicked = random.random(2000) < rate
    lines = [f"{int(c)},s{s},{a}" for c, s, a in zip(clicked, site, age, strict=True)]
    (folder / f"day-{day}.csv").write_text("\n".join(["clicked,site,age", *lines]) + "\n")


def config(folder: Path) -> ExperimentConfig:
    return build_config(
        {
            "recipe": "ctr",
            "devices": "cpu",
            "data": {"path": str(folder), "label": "clicked"},
            "model": {"dim": 4, "hidden": 16, "layers": 1},
            "train": {"epochs": 2, "batch_size": 200, "lr": 0.01, "seed": 1},
            "checkpoint": {"register_as": "clicks"},
        }
    )


@pytest.mark.slow
def test_three_days_of_data(
    tmp_path: Path,
    data_dir: Path,
    embedded_store: None,
    prefect_server: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    days = tmp_path / "days"
    days.mkdir()
    experiment, runs = config(days).model_dump(exclude_unset=True), data_dir / "runs"

    def retrain() -> str:
        state = retrain_hybrid(config=experiment, return_state=True)
        assert state.is_completed(), state.message
        return f"{state.name}: {state.message}"

    @contextmanager
    def giving_way(_devices: object, _settings: Settings, stop: StopRequest) -> Iterator[None]:
        stop.ask("the end of training hours", requeue=True)
        yield

    write_day(days, 1, range(40))
    page = tmp_path / "config.json"
    page.write_text(config(days).model_dump_json())
    with monkeypatch.context() as context:
        context.setattr("dphybrid.run.job.giving_way", giving_way)
        assert main(["--config", str(page)]) == os.EX_TEMPFAIL
    write_day(days, 2, range(40))  # of which the run that goes on knows nothing
    capsys.readouterr()
    assert main(["--config", str(page)]) == 0
    assert "Promoted: the challenger of clicks is better: validation auc" in capsys.readouterr().out
    (days / "day-2.csv").unlink()
    (run_page,) = runs.glob("*/run.json")
    assert json.loads(run_page.read_text())["attempt"] == 2
    registry = open_registry(load_settings())
    first = registry.champion("clicks")
    assert first.number == "1"
    assert retrain() == "NothingNew: no new data since version 1 was made"
    header, *rows = (days / "day-1.csv").read_text().splitlines()
    (days / "day-1.csv").write_text("\n".join([header, *reversed(rows)]) + "\n")
    assert retrain() == "NothingNew: the data has changed, and no row is new"
    assert len(list(runs.iterdir())) == 1
    write_day(days, 2, range(35, 75))  # of 35 sites the champion knows nothing, so the gain is beyond doubt
    better = retrain()
    assert better.startswith("Promoted: the challenger of clicks version 1 is better: validation auc")
    second = registry.champion("clicks")
    assert second.number == "2"
    assert second.decision.startswith("promoted: better: ")
    run = read_run(second.run_tags["dphybrid.run_folder"], load_settings())
    data = open_prepared(Path(run.page.prepared))
    assert not set(data.arrays["valid_rows"]) & set(data.arrays["train_rows"])

    write_day(days, 3, range(60))
    experiment["train"]["lr"], experiment["table"] = 1e-9, {"lr": 1e-9}  # the challenger learns nothing
    kept = retrain()
    assert kept.startswith("Kept: the challenger of clicks version 2 is not ")
    newest, champion = registry.newest("clicks"), registry.champion("clicks")
    assert (newest.number, champion.number) == ("3", "2")
    assert newest.decision.startswith("kept: not ")
    assert retrain() == "NothingNew: no new data since version 3 was made"
    assert len(list(runs.iterdir())) == 3


def gain_of(decision: Decision) -> tuple[float, ...]:
    """Return the gain that a decision tells, and the ends of its interval."""
    (told,) = re.findall(r"gain (\S+), 95 % interval (\S+) to (\S+)$", decision.why)
    return tuple(map(float, told))


def test_the_bootstrap_knows_a_gain_from_noise() -> None:
    random = torch.Generator().manual_seed(0)
    labels = (torch.rand(2000, generator=random) < 0.5).float()
    good = labels * 2 - 1 + torch.randn(2000, generator=random)
    poor = labels * 2 - 1 + 3 * torch.randn(2000, generator=random)
    same = good + 1e-3 * torch.randn(2000, generator=random)

    def outputs(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"labels_B": labels, "logits": logits}

    def auc(logits: torch.Tensor) -> float:
        return BINARY.compute(outputs(logits))["auc"]

    better = compared(outputs(poor), outputs(good), BINARY, 0, "the old one's")
    assert better.promoted
    assert gain_of(better)[1] > 0.1
    # By chance a little better: the interval decides, not the gain.
    old, new = (same, good) if auc(same) < auc(good) else (good, same)
    kept = compared(outputs(old), outputs(new), BINARY, 0, "the old one's")
    gain, low, high = gain_of(kept)
    assert low < 0 < gain < high
    assert not kept.promoted
    assert kept.text.startswith("kept: not significantly better: validation auc 0.")


def test_of_an_error_the_smaller_is_the_better() -> None:
    def outputs(errors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": errors.square(), "weight": torch.ones(len(errors))}

    errors = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    better = compared(outputs(errors), outputs(errors / 2), REGRESSION, 0, "the old one's")
    assert better.promoted
    gain, low, _ = gain_of(better)
    assert gain == pytest.approx(float(errors.square().mean()) * 3 / 4, rel=1e-2)
    assert gain > low > 0
    assert not compared(outputs(errors / 2), outputs(errors), REGRESSION, 0, "the old one's").promoted
