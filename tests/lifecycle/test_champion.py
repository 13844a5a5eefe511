"""Champion and challenger, with MLflow's own registry: who is compared with whom, after kills too, and that
one process at a time retrains a model."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any
from uuid import uuid4

import numpy as np
import polars as pl
import pytest
from mlflow.tracking import MlflowClient

import dphybrid
from dphybrid.config import ExperimentConfig
from dphybrid.config.own_runs import enter
from dphybrid.config.settings import load_settings
from dphybrid.lifecycle import champion, retrain
from dphybrid.lifecycle.champion import Decision, decide_waiting, judge, open_registry
from dphybrid.lifecycle.retrain import lock_file, plan_retraining, retraining
from dphybrid.recipes.configs import apply_overrides, build_config
from dphybrid.run.folder import Run, attached, read_run
from dphybrid.run.job import run_job
from dphybrid.run.pages import ResultPage
from dphybrid.serving.load import find_checkpoint
from dphybrid.tracking.tracker import CHAMPION_TAG
from dphybrid.training.saving import checkpoint_uid
from dphybrid.util.locks import take
from dphybrid.util.stop import Interrupted, StopRequest
from tests import stores
from tests.commands import command, version_of
from tests.conftest import own_settings
from tests.refusing import refused

POOR, FAIR, GOOD = (f"train.lr={lr}" for lr in (1e-6, 1e-3, 3e-2))
ROUNDS = {POOR: 1, FAIR: 1, GOOD: 4}


def day(number: int, shops: range, rows: int = 600) -> pl.DataFrame:
    """Rows of a day: whether somebody buys follows mostly from the shop."""
    random = np.random.default_rng(number)
    shop = random.integers(shops.start, shops.stop, rows)
    rate = np.where(shop % 2 == 0, 0.9, 0.1)
    return pl.DataFrame(
        {
            "shop": [f"s{n}" for n in shop],
            "weather": random.normal(size=rows).round(9),  # no two rows are the same
            "buys": (random.random(rows) < rate).astype(int),
        }
    )


def config(days: Path, name: str, how: str) -> ExperimentConfig:
    return apply_overrides(
        build_config(
            {
                "recipe": "ctr",
                "devices": "cpu",
                "data": {"path": str(days), "label": "buys", "valid_fraction": 0.4},
                "model": {"dim": 4, "hidden": 8, "layers": 1, "dropout": 0.0},
                "table": {"lr": {POOR: 1e-6, FAIR: 0.003, GOOD: 0.1}[how]},
                "train": {"epochs": ROUNDS[how], "batch_size": 50, "seed": 1},
                "checkpoint": {"register_as": name},
            }
        ),
        [how],
    )


class Shop:
    """A folder of days, and the steps of retrainings. trained: the runs of each way to train, by the version
    that they started from, so that most orders need no training of their own."""

    def __init__(self, days: Path) -> None:
        self.days, self.settings = days, load_settings()
        self.registry = open_registry(self.settings)
        self.trained: dict[tuple[str, str], Run] = {}
        self.first: Run | None = None

    def begin(self, name: str) -> None:
        """Register a poor first version as the champion."""
        if self.first is None:
            self.first = self._run(config(self.days, name, POOR), {})
        self._register(self.first, name)
        assert self.registry.champion(name).number == "1"

    def plan(self, name: str, how: str) -> tuple[Any, str, str]:
        planned = plan_retraining(config(self.days, name, how), self.settings)
        return planned, how, self.registry.champion(name).run_id

    def train(self, name: str, planned: tuple[Any, str, str]) -> Run:
        """Train as planned, or take the run that was trained so before, and register it."""
        plan, how, start = planned
        if (how, start) not in self.trained:
            self.trained[how, start] = self._run(plan.config, {CHAMPION_TAG: plan.champion})
        run = self.trained[how, start]
        self._register(run, name)
        copy = self.settings.runs_dir / f"{run.folder.name}-{name}"
        shutil.copytree(run.folder, copy, ignore=shutil.ignore_patterns(".lock"))
        page = run.page.model_dump() | {"tags": {CHAMPION_TAG: plan.champion}}
        page["config"]["checkpoint"]["register_as"] = name
        page["uid"] = enter(copy)
        type(run.page).model_validate(page).write(copy / "run.json")
        return read_run(copy, self.settings)

    def decide(self, run: Run) -> Decision:
        return judge(run.folder, self.settings)

    def _run(self, chosen: ExperimentConfig, tags: dict[str, str]) -> Run:
        report = run_job(apply_overrides(chosen, ["checkpoint.register_as="]), self.settings, tags=tags)
        return read_run(self.settings.runs_dir / report.run_name, self.settings)

    def _register(self, run: Run, name: str) -> None:
        best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
        tracker = attached(run)
        assert tracker.register(name, checkpoint_uid(best), "challenger") == ""
        tracker.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, folder / "data")
        patch.setattr(champion, "_NUM_RESAMPLES", 50)
        patch.setattr(retrain, "source_digest", lambda _: uuid4().hex)  # the data is always new
        stores.put_database("mlflow", folder / "data" / "mlflow" / "mlflow.db")
        (folder / "days").mkdir()
        day(1, range(6)).write_parquet(folder / "days" / "1.parquet")
        found = Shop(folder / "days")
        found.begin("warm-up")
        day(2, range(12)).write_parquet(folder / "days" / "2.parquet")
        yield found


def test_damaged_rows_do_not_decide(shop: Shop) -> None:
    shop.begin("damaged")
    run = shop.train("damaged", shop.plan("damaged", GOOD))
    file = next(Path(run.page.prepared).glob("*.npy"))
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with refused(file.name):
            shop.decide(run)
    finally:
        file.write_bytes(content)
    assert shop.registry.champion("damaged").number == "1"
    assert shop.registry.newest("damaged").run_id in shop.registry.undecided("damaged")


def test_a_retraining_whose_fields_have_changed_stops_no_other(shop: Shop) -> None:
    name = "changed"
    shop.begin(name)
    old = shop.train(name, shop.plan(name, FAIR))
    values = {**old.page.config, "train": {**old.page.config["train"], "momentum_of_old": 1}}
    old.page.model_copy(update={"config": values}).write(old.folder / "run.json")
    run = shop.train(name, shop.plan(name, GOOD))
    found = {run.folder.name: decision for run, decision in decide_waiting(shop.settings, name)}
    assert "fields have changed since" in str(found[old.folder.name])
    assert found[run.folder.name].promoted
    shutil.rmtree(old.folder)  # which nobody can decide about


def test_a_retraining_that_dies_between_alias_and_decision_is_decided(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "killed"
    shop.begin(name)
    run = shop.train(name, shop.plan(name, GOOD))
    (run.folder / "report.json").unlink(missing_ok=True)  # as of a run that had not got further yet

    def dies(*_: object) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_model_version_tag", dies)
        with pytest.raises(SystemExit):
            shop.decide(run)
    assert shop.registry.champion(name).number == "2"
    assert f"{run.folder.name}: promoted: " in command("sync")
    assert shop.registry.champion(name).number == "2"
    assert version_of(shop.registry, name, "2").decision.startswith("promoted: ")
    assert "Nothing to do" in command("sync")


@pytest.mark.slow
def test_a_challenger_that_is_registered_later_is_decided_by_sync(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.begin("late")
    with monkeypatch.context() as patch:
        patch.setattr(shop, "_register", lambda *_: None)
        run = shop.train("late", shop.plan("late", GOOD))
    run_of_first = shop.registry.champion("late").run_id
    shop.decide(shop.train("late", shop.plan("late", FAIR)))
    with refused("is not registered as 'late' yet; `dphybrid sync` registers it and compares it"):
        shop.decide(run)
    shop._register(run, "late")
    shop._register(shop.trained[FAIR, run_of_first], "late")  # its record comes once more
    challenger = shop.registry._client.get_model_version_by_alias("late", "challenger")
    assert (str(challenger.version), challenger.run_id) == ("3", run.page.run_id)
    ((waiting, decision),) = decide_waiting(shop.settings, "late")
    assert waiting.folder == run.folder
    assert isinstance(decision, Decision)
    assert decision.promoted
    assert decision.against == "2"
    assert shop.registry.champion("late").number == "3"


def test_data_of_another_kind_is_said_and_the_champion_stays(shop: Shop, tmp_path: Path) -> None:
    name = "other"
    shop.begin(name)
    run = shop.train(name, shop.plan(name, GOOD))
    (tmp_path / "days").mkdir()
    day(9, range(6)).with_columns(pl.col("weather") * 100).write_parquet(tmp_path / "days" / "9.parquet")
    foreign = shop._run(config(tmp_path / "days", name, FAIR), {})
    shop._register(foreign, name)
    MOVED = shop.registry.newest(name, foreign.page.run_id)
    shop.registry._client.set_registered_model_alias(name, "champion", MOVED.number)  # by hand, in MLflow
    decision = shop.decide(run)
    assert not decision.promoted
    assert decision.why.startswith(
        "not compared: the champion is version 3 now, which was trained on other data"
    )
    assert shop.registry.champion(name).number == "3"


def test_a_second_retraining_waits_until_the_first_has_ended(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    first = take(lock_file("busy", shop.settings))  # tests/util/test_files.py kills who holds one
    assert first is not None
    with retraining("another", shop.settings, StopRequest()):
        pass
    (cancelled := StopRequest()).ask("Ctrl-C", signal.SIGINT)
    waits = pytest.raises(Interrupted, match="stopped by Ctrl-C while it waited for another retraining")
    with waits, retraining("busy", shop.settings, cancelled):
        pass
    Timer(0.3, os.close, [first]).start()
    with retraining("busy", shop.settings, StopRequest()):
        pass
    assert "Waiting: another process retrains busy\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_copied_data_folder_is_whole_by_itself(shop: Shop, tmp_path: Path) -> None:
    """Runs and prepared data of the copy are used, not those of the original."""
    shop.begin("copied")
    shop.decide(shop.train("copied", shop.plan("copied", GOOD)))
    run = shop.trained[GOOD, version_of(shop.registry, "copied", "1").run_id].folder.name
    rows = day(7, range(12), 50)
    before = dphybrid.load(run).predict(rows).tolist()
    shutil.copytree(shop.settings.data_dir, tmp_path / "copy", symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPHYBRID_DATA_DIR", str(tmp_path / "copy"))
        settings = load_settings()
        assert find_checkpoint(run, settings).is_relative_to(tmp_path / "copy")
        assert dphybrid.load(run).predict(rows).tolist() == before
        plan = plan_retraining(config(shop.days, "copied", GOOD), settings)
        for place in (plan.config.data.base, plan.config.train.warm_start):
            assert Path(str(place)).is_relative_to(tmp_path / "copy")
        resumed = read_run(settings.runs_dir / run, settings)
        assert Path(resumed.page.prepared).is_relative_to(tmp_path / "copy")
        assert Path(str(resumed.config.data.base)).is_relative_to(tmp_path / "copy")
        named = f"{shop.settings.data_dir}/"
        pages = [*settings.runs_dir.glob("*/r*.json"), *settings.prepared_dir.glob("*/manifest.json")]
        told = [page for page in pages if named in page.read_text() and page.name != "report.json"]
        assert told == [], "no page names the original"
