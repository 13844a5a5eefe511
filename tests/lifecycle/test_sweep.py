"""A sweep of a grid, and one that searches: the study goes on where it was stopped, ends bad runs early, and
refuses to go on with other values."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import load_settings
from dphybrid.lifecycle import sweep as sweeping
from dphybrid.lifecycle.sweep import RunFailed, Sweep, run_sweep, train_apart
from dphybrid.recipes.configs import build_config, load_config
from dphybrid.run.pages import Report
from dphybrid.util.stop import StopRequest
from tests.refusing import refused

SPACE = {"train.lr": {"low": 0.001, "high": 0.1, "log": True}, "train.batch_size": [32, 64]}
GRID = {"train.lr": [0.01, 0.02, 0.03], "train.batch_size": [32, 64]}


def some_report(**facts: object) -> Report:
    """A report that says nothing but these facts."""
    values: dict[str, Any] = {name: "x" for name, field in Report.model_fields.items() if field.is_required()}
    values |= {"splits": [], "split_lines": []}
    values |= {name: {} for name in ("stages", "step_ms", "digests")}
    return Report.model_validate(values | facts)


class Sweeps:
    """Sweeps on digits whose runs are quick: accuracy is 1 - lr, epoch by epoch. trained: the runs' names.
    stops_at: the number of the run during which the sweep is stopped. failing: runs that fail."""

    def __init__(self) -> None:
        self.trained = list[str]()
        self.stops_at, self.dies_at = 0, 0
        self.failing = set[str]()
        self.histories: dict[str, list[dict[str, float]]] = {}

    def train_apart(self, name: str, config: ExperimentConfig, folder: Path, *given: Any) -> Report:
        *_, stop, enough = given
        self.trained.append(name)
        if len(self.trained) == self.dies_at:
            raise SystemExit("killed")
        if len(self.trained) == self.stops_at:
            stop.ask("the test")
            raise RunFailed("stopped")
        if name in self.failing:
            raise RunFailed(f"{name} fails")
        accuracy = 1 - config.train.lr
        for _ in range(3):
            self.histories.setdefault(name, []).append({"validation accuracy": accuracy})
            if enough():
                raise RunFailed("ended")
        return some_report(metrics={"accuracy": accuracy})

    def go(self, grid: dict[str, Any], *values: str, trials: int = 0, at_once: int = 1) -> Any:
        """Run the sweep; return what became of each run, by the run's name."""
        config = load_config(None, ["recipe=digits", "devices=cpu", *values])
        results = run_sweep(Sweep("s", config, grid, trials), load_settings(), StopRequest(), at_once)
        return {result["run"]: result for result in results}


@pytest.fixture
def sweeps(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    found = Sweeps()
    monkeypatch.setattr(sweeping, "train_apart", found.train_apart)
    monkeypatch.setattr(sweeping, "complete_checkpoints", lambda folder: [folder])

    def read_state(folder: Path) -> Any:
        return SimpleNamespace(progress=SimpleNamespace(history=found.histories[folder.parent.name]))

    monkeypatch.setattr(sweeping, "read_state", read_state)
    return found


def test_a_search_goes_on_where_it_was_stopped(sweeps: Sweeps) -> None:
    sweeps.stops_at = 3
    sweeps.go(SPACE, trials=5)
    assert sweeps.trained == ["s-001", "s-002", "s-003"]
    results = sweeps.go(SPACE, trials=5)
    assert sweeps.trained[3:] == ["s-003", "s-005", "s-006"]  # trial 4 is the third run again
    assert [*results] == ["s-001", "s-002", "s-003", "s-005", "s-006"]
    assert all(0.001 <= float(found["train.lr"]) <= 0.1 for found in results.values())
    assert len({found["train.lr"] for found in results.values()}) == 5  # no draw comes again after a start
    sweeps.go(SPACE, trials=5)
    assert len(sweeps.trained) == 6


def test_runs_below_the_median_end_early(sweeps: Sweeps) -> None:
    results = sweeps.go(SPACE, trials=10).values()
    ended = [float(found["train.lr"]) for found in results if "pruned" in found]
    assert ended
    assert not any("failed" in found for found in results)
    assert min(ended) > min(float(found["train.lr"]) for found in results if "accuracy" in found)


@pytest.mark.parametrize("at_once", [1, 3])
def test_each_cell_of_a_grid_is_trained_once_and_failed_ones_again(sweeps: Sweeps, at_once: int) -> None:
    sweeps.failing = {"s-002", "s-005"}
    results = sweeps.go(GRID, at_once=at_once)
    names = [f"s-00{number}" for number in range(1, 7)]
    assert sorted(sweeps.trained) == names == [*results]
    assert [(found["train.lr"], found["train.batch_size"]) for found in results.values()] == [
        (str(lr), str(size)) for lr in GRID["train.lr"] for size in GRID["train.batch_size"]
    ]
    failed = {name: found["failed"] for name, found in results.items() if "failed" in found}
    assert failed == {name: f"{name} fails" for name in sorted(sweeps.failing)}
    again, sweeps.failing = sorted(sweeps.failing), set()
    results = sweeps.go(GRID, at_once=at_once)
    assert sorted(sweeps.trained[6:]) == again
    assert [found["accuracy"] for found in results.values()] == [
        1 - lr for lr in GRID["train.lr"] for _ in "ab"
    ]
    sweeps.go(GRID, at_once=at_once)
    assert len(sweeps.trained) == 8


def test_a_sweep_that_was_killed_goes_on_even_after_half_a_line(sweeps: Sweeps, data_dir: Path) -> None:
    sweeps.dies_at = 3
    with pytest.raises(SystemExit):
        sweeps.go(GRID)
    journal = data_dir / "sweeps" / "s" / "study.journal"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    with journal.open("ab") as stream:
        stream.write(b'{"op_code":4,"worker_id":"x"')
    results = sweeps.go(GRID)
    assert not any("failed" in found for found in results.values())
    assert sweeps.trained[-1] == sweeps.trained[2]
    assert len(set(sweeps.trained)) == 6
    assert len(sweeps.trained) == 7
    study = optuna.load_study(study_name="s", storage=storage)  # as docs/look.md says
    assert study.best_value == pytest.approx(0.99)
    journal.write_bytes(b"x\n" + journal.read_bytes())
    with refused("study.journal: is damaged, so the sweep cannot go on; give --sweep another name"):
        sweeps.go(GRID)


def test_a_sweep_goes_on_with_the_same_values_only(sweeps: Sweeps) -> None:
    sweeps.go(GRID)
    for grid, values, trials in (
        (GRID, ["train.seed=7"], 0),
        ({**GRID, "train.lr": [0.01, 0.02]}, [], 0),
        (GRID, [], 5),
    ):
        with refused("--sweep s: was begun with another grid, .*; give the same ones, or choose another"):
            sweeps.go(grid, *values, trials=trials)
    assert len(sweeps.trained) == 6


def test_the_same_sweep_runs_once_at_a_time(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on, train = threading.Event(), threading.Event(), sweeps.train_apart

    def slowly(*given: Any) -> Report:
        began.set()
        assert goes_on.wait(60)
        return train(*given)

    monkeypatch.setattr(sweeping, "train_apart", slowly)
    first = threading.Thread(target=sweeps.go, args=(GRID,))
    first.start()
    assert began.wait(60)
    with refused("--sweep s: runs in another process; wait for its end"):
        sweeps.go(GRID)
    goes_on.set()
    first.join(60)
    assert len(sweeps.trained) == 6


def test_what_a_field_does_not_allow_is_refused(sweeps: Sweeps) -> None:
    for grid, trials, words in (
        ({}, 0, "give at least one field"),
        ({"train.lr": {"low": 1, "high": 2}}, 0, "or with --trials a range"),
        ({"train.lr": {"low": 1}}, 2, "give low and high, and optionally log or step"),
        ({"train.lr": {"low": 2, "high": 1}}, 2, "grid: train.lr = .*low"),
        ({"train.lr": {"low": -1, "high": 1}}, 2, "train.lr=-1"),
        ({"train.lr": []}, 0, "give a list of values"),
        ({"train.lr": "0.1"}, 2, "give a list of values, or with --trials a range"),
        ({"train.epochs": [1, -1]}, 0, "grid: .train.epochs=-1.*train.epochs"),
        ({"train.batchsize": [1]}, 0, "batchsize=1.: .*did you mean 'train.batch_size'"),
        ({"train.lr": ["x"]}, 0, ".train.lr=x.: .*must be a valid number$"),
    ):
        with refused(words):
            sweeps.go(grid, trials=trials)
    assert sweeps.trained == []
    found = sweeps.go({"train.batch-size": [64]})["s-001"]
    assert found["train.batch_size"] == "64"  # the name of the param, by which runs are compared


def test_a_run_is_ended_once_it_is_enough(data_dir: Path, tmp_path: Path) -> None:
    config = build_config({"recipe": "toy"})
    with pytest.raises(RunFailed, match="^c ended with "):
        train_apart("c", config, tmp_path, load_settings(), {}, StopRequest(), enough=lambda: True)


def test_runs_that_other_metrics_measure_are_not_swept(data_dir: Path, tmp_path: Path) -> None:
    rows = "".join(f"{n % 7},{n % 2},{n / 7}\n" for n in range(90))
    (tmp_path / "t.csv").write_text("shop,sold,price\n" + rows)
    config = build_config(
        {"recipe": "ctr", "devices": "cpu", "data": {"path": str(tmp_path / "t.csv"), "label": "sold"}}
    )
    with refused("grid: its runs are measured by auc and rmse; give values with one deciding metric"):
        run_sweep(Sweep("s", config, {"data.label": ["sold", "price"]}), load_settings(), StopRequest())
