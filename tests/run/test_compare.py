"""Runs side by side: metrics, differing values, width, the addresses of MLflow's pages."""

import json
from pathlib import Path
from urllib.parse import unquote

import pytest

from dphybrid.cli.compare import tables
from dphybrid.cli.ui import page_path
from dphybrid.config.settings import load_settings
from dphybrid.run.folder import Run, all_runs
from dphybrid.run.pages import MetricsPage
from dphybrid.tracking.record import RecordFile, destination
from dphybrid.util.text import metric_text
from tests.commands import command, run_with
from tests.refusing import refused


@pytest.fixture
def runs(unrecorded: None, data_dir: Path) -> list[Run]:
    for devices, lr, name in (
        ("cpu", 0.1, "one"),
        ("cpu*2", 0.1, "two"),
        ("cpu", 0.2, "a run of a long name"),
    ):
        values = [f"devices={devices}", f"train.lr={lr}", "train.epochs=1", "train.print_splits=new"]
        run_with("recipe=toy", *values, run_name=name)
    return all_runs(load_settings())


def addressed(run: Run, number: int) -> None:
    where = {"run_id": f"{number}" * 32, "experiment_id": "7", "tracking_uri": "http://server:5000"}
    record = RecordFile(run.folder)
    record.append({"op": "run", "name": run.folder.name, **where})
    record.close()


def test_metrics_and_differing_values_stand_side_by_side(runs: list[Run]) -> None:
    said = command("compare", "one", "two", "a run of a long name")
    rows = {line.split("  ")[0]: line for line in said.splitlines()}
    assert list(rows) == ["run", "mse", "devices", "train.lr"]
    assert rows["devices"].split() == ["devices", "cpu", "cpu*2", "cpu"]
    assert rows["train.lr"].split() == ["train.lr", "0.1", "0.1", "0.2"]
    best = MetricsPage.read(runs[0].folder / "metrics.json").metrics["mse"]
    assert rows["mse"].split()[1] == metric_text(best)
    assert max(len(line) for table in tables(runs * 3) for line in table.splitlines()) <= 80
    assert len(tables(runs * 3)) > 1


def test_wrong_calls_say_what_is_there(runs: list[Run]) -> None:
    assert "one2: there is no such run; did you mean 'one'?" in command("compare", "one2", "two", ends=2)
    assert "needs two to 6 runs, and these are 1" in command("compare", "one", "one", ends=2)


def test_pages_of_mlflow_open_at_the_runs(runs: list[Run]) -> None:
    settings = load_settings()
    assert "Curves" not in command("compare", "one", "two")
    assert page_path(settings, None).startswith("/experiments?")
    for number, run in enumerate(runs[:2], start=1):
        addressed(run, number)
    address = unquote(command("compare", "one", "two").splitlines()[-1])
    ids = json.dumps([destination(run.folder)["run_id"] for run in runs[:2]])
    assert address == f'Curves: http://server:5000/#/compare-runs?runs={ids}&experiments=["7"]'
    assert page_path(settings, "two").startswith(f"/experiments/7/runs/{'2' * 32}?")
    assert page_path(settings, None).startswith("/experiments/7/runs?")
    with refused("a run of a long name: is not recorded in MLflow"):
        page_path(settings, "a run of a long name")
