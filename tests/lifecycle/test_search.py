"""A sweep that searches: its study goes on, ends bad runs early, and refuses what fields do not allow."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle import search as searching
from dphybrid.lifecycle.search import Search, search
from dphybrid.lifecycle.sweep import Cell, CellFailed, failures
from dphybrid.recipes.configs import load_config
from dphybrid.util.stop import StopRequest

SPACE = {"train.lr": {"low": 0.001, "high": 0.1, "log": True}, "train.batch_size": [32, 64]}


@pytest.fixture
def swept(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A search on digits whose runs are quick: accuracy is 1 - lr, epoch by epoch."""
    trained: list[str] = []
    histories: dict[str, list[dict[str, float]]] = {}

    def run_cell(cell: Cell, *given: Any) -> Any:
        *_, stop, enough = given
        trained.append(cell.name)
        if len(trained) == stops_at:
            stop.ask("the test")
            raise CellFailed("stopped", final=True)
        accuracy = 1 - cell.config.train.lr
        for _ in range(3):
            histories.setdefault(cell.name, []).append({"validation accuracy": accuracy})
            if enough():
                raise CellFailed("ended", final=True)
        return SimpleNamespace(metrics={"accuracy": accuracy}, run_url="")

    stops_at = 0
    monkeypatch.setattr(searching, "run_cell", run_cell)
    monkeypatch.setattr(searching, "complete_checkpoints", lambda folder: [folder])
    monkeypatch.setattr(
        searching,
        "read_state",
        lambda folder: SimpleNamespace(progress=SimpleNamespace(history=histories[folder.parent.name])),
    )

    def go(trials: int, stopping: int = 0, prune: bool = True) -> Any:
        nonlocal stops_at
        stops_at = len(trained) + stopping if stopping else 0
        config = load_config(None, ["recipe=digits", "devices=cpu"])
        what = Search(SPACE, trials, prune=prune)
        return search(what, config, "s", load_settings(), StopRequest(), 1)

    go.trained = trained  # type: ignore[attr-defined]
    return go


def test_a_search_goes_on_where_it_was_stopped(swept: Any) -> None:
    swept(6, stopping=4, prune=False)
    assert swept.trained == ["s-001", "s-002", "s-003", "s-004"]
    grid, _ = swept(6, prune=False)
    assert swept.trained[4:] == ["s-004", "s-006", "s-007"]  # trial 5 is the fourth run again
    assert [cell.name for cell in grid] == ["s-001", "s-002", "s-003", "s-004", "s-006", "s-007"]
    assert all(0.001 <= float(cell.values["train.lr"]) <= 0.1 for cell in grid)
    assert len({cell.values["train.lr"] for cell in grid}) == 6  # no draw comes again after a start
    swept(6, prune=False)
    assert len(swept.trained) == 7


def test_runs_below_the_median_end_early(swept: Any) -> None:
    grid, reports = swept(10)
    ended = {name for name, done in reports.items() if isinstance(done, str)}
    assert ended
    assert failures(reports) == {}
    rates = {cell.name: cell.config.train.lr for cell in grid}
    whole = [rate for name, rate in rates.items() if name not in ended]
    assert min(rates[name] for name in ended) > min(whole)
