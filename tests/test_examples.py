"""The programs of examples/ run, and do what their descriptions say."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from examples import make_notebook, own_loop, tutorial
from examples.memory import own_decoder, row_adapter
from tests.commands import models_of, python, run_with
from tests.conftest import REPOSITORY


@pytest.fixture(autouse=True)
def _from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))


def test_the_own_loop_learns_by_changing_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    told = own_loop.main()
    assert told["last"] < 0.1 * told["first"]
    assert own_loop.main("cpu")["last"] == pytest.approx(told["last"], rel=1e-3)
    assert 50 <= told["changed"] <= 100  # ids lie below 50, of 100,000 rows
    assert capsys.readouterr().out.count("In Model: input size torch.Size([16, 2, 16])") == 3  # and one of 14


def test_the_tutorial_splits_trains_a_table_and_a_gan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu*3")
    torch.manual_seed(0)
    tutorial.split_a_batch()
    told = capsys.readouterr().out
    assert told.startswith("Let's use 3 devices!")
    shares = re.findall(r"In Model: input size torch.Size\(\[(\d+), 5\]\)", told)
    assert shares == ["10"] * 9 + ["4", "4", "2"]
    assert tutorial.Blocks()(torch.randn(30, 10)).shape == (30, 20)
    assert tutorial.train_a_table(num_rows=1000) < 0.01
    mean, spread = tutorial.train_a_gan()
    assert abs(mean - 3) < 0.3
    assert abs(spread - 0.5) < 0.3


def test_rows_learn_over_a_published_table_and_merge_into_it(capsys: pytest.CaptureFixture[str]) -> None:
    bits = row_adapter.main(steps=6)
    assert bits["adapted"] < bits["published"] - 0.02
    assert bits["merged"] == pytest.approx(bits["adapted"], abs=0.02)
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_the_own_decoder_learns_more_with_a_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu*2")
    means = own_decoder.main(steps=20)
    assert means["memory"] < means["plain"] - 0.1
    assert own_decoder.train(memory=True, steps=4, devices="cpu") == pytest.approx(
        own_decoder.train(memory=True, steps=4), rel=1e-4
    )


def test_the_notebook_is_the_script_and_prints_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu*3")
    page = nbformat.read(make_notebook.NOTEBOOK, as_version=4)
    cells = make_notebook.cells_of(make_notebook.SCRIPT.read_text(encoding="utf-8"))
    assert [(cell.cell_type, cell.source) for cell in page.cells] == cells, "python -m examples.make_notebook"

    def splits(text: str) -> list[str]:
        return re.findall(r"^.*(?:size|rows|blocks: )\b.*$", text, re.MULTILINE)

    script = python(make_notebook.SCRIPT, cwd=REPOSITORY)
    now = make_notebook.printed(make_notebook.executed(cells))
    assert len(splits(script.stdout)) > 15
    assert splits(make_notebook.printed(page)) == splits(now) == splits(script.stdout)


def test_an_own_recipe_is_on_record_under_its_import_path(data_dir: Path) -> None:
    """MLflow takes neither dots nor colons in a model's name."""
    report = run_with("recipe=examples.own_recipe:Ratings", "train.epochs=1")
    run = MlflowClient(report.tracking_uri).get_run(report.run_id)
    assert run.data.params["recipe"] == "examples.own_recipe:Ratings"
    assert run.data.metrics["final_right"] == report.metrics["right"]
    (model,) = models_of(report)
    assert model.name == f"examples-own_recipe-Ratings-{Path(report.best_checkpoint).name}"


def test_from_a_dataframe_to_predictions(unrecorded: None, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(REPOSITORY / "examples/dataframe.py"), run_name="__main__")
    (right,) = re.findall(r"([\d.]+)% of 200 new rows are right", capsys.readouterr().out)
    assert float(right) > 90
