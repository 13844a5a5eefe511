"""Vocabularies, predictions and the baseline of a recipe of one's own."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

import dphybrid
from dphybrid.config.settings import load_settings
from dphybrid.recipes import Recipe, Task
from dphybrid.run.pages import MetricsPage, Report
from dphybrid.training.metrics import floor_metrics, mean_of
from examples.films import Films
from tests.commands import command, run_with
from tests.conftest import own_settings
from tests.refusing import refused


class Ratings(Films):
    """The example to copy, with fewer rows and one vocabulary more."""

    def rows(self, data: Any, seed: int) -> Any:
        *splits, known = super().rows(data, seed)
        few = [{name: values[:400] for name, values in split.items()} for split in splits]
        return (*few, known | {"people": known["user"]})

    def predict(self, model: Any, rows: pl.DataFrame, vocabularies: Any) -> pl.DataFrame:
        known = {name: vocabularies[name] for name in ("user", "item")}
        return super().predict(model, rows, known).select("rating")


class Parted(Ratings):
    name = "parted"

    def rows(self, data: Any, seed: int) -> Any:
        train, valid, known = super().rows(data, seed)
        parts = [
            {name: cells[part] for name, cells in valid.items()} for part in (slice(100), slice(100, 200))
        ]
        return (train, *parts, known)


class Odd(Ratings):
    name = "odd"

    def rows(self, data: Any, seed: int) -> Any:
        return (*super().rows(data, seed)[:2], [1])


PREDICT = ("predict", "one", "--data.path", "new.csv")


def trained(recipe: str = "Ratings") -> Report:
    return run_with(f"recipe={__name__}:{recipe}", "devices=cpu*2", "train.epochs=2", run_name="one")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """A run `one` of the recipe."""
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, tmp_path_factory.mktemp("films"), TRACKING_URI="none")
        yield trained()


def test_a_file_is_predicted_with_trainings_words(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = dphybrid.load_model("one")
    assert model.users.num_rows == 62
    rows = pl.DataFrame({"user": ["user 3", "a stranger", None], "item": ["item 4"] * 3, "day": [1, 2, 3]})
    found = dphybrid.load("one").predict(rows)
    shutil.rmtree(load_settings().prepared_dir)  # the checkpoint has all that is needed
    again = dphybrid.load(report.best_checkpoint, batch_size=2).predict(rows.to_dict(as_series=False))
    assert again.equals(found)
    with refused("recipe .*:Ratings scores rows, with predict.rows."):
        dphybrid.runs()["one"].recommend("user 3")
    known = dphybrid.load("one").vocabularies
    three, four = known["user"].ids("user 3").item(), known["item"].ids("item 4").item()
    with torch.no_grad():
        expected_B = model.ratings(torch.tensor([three, 1, 0]), torch.tensor([four] * 3))
    assert found["rating"].to_list() == expected_B.tolist()
    rows.write_csv("new.csv")
    assert "Predictions of 3 rows: out.csv" in command(*PREDICT, "--out", "out.csv", "--keep", "day")
    written = pl.read_csv("out.csv")
    assert written["day"].to_list() == [1, 2, 3]
    assert written["rating"].to_list() == pytest.approx(found["rating"].to_list(), rel=1e-6)
    assert command(*PREDICT).splitlines()[0] == "rating"
    assert "evaluates no files" in command("evaluate", *PREDICT[1:], ends=2)


TOLD = {
    ("--top", "5"): "top: is not an option of recipe films's predictions",
    ("--keep", "price"): "new.csv has no such column",
    ("--keep", "rating"): "--keep rating: predictions have a column of that name",
    ("--data.delimiter", ";"): "the rows have no column 'user'",
}


def test_what_cannot_be_predicted_is_told(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*flags: str) -> str:
        said = command(*PREDICT, "--out", "out.csv", *flags, ends=2)
        assert not Path("out.csv").exists()
        return " ".join(said.split())

    monkeypatch.chdir(tmp_path)
    Path("new.csv").write_text("user,item,rating\nuser 1,item 2,0.5\n")
    for flags, words in TOLD.items():
        assert words in told(*flags)
    monkeypatch.setattr(Ratings, "predict", lambda *_: [1.0])
    assert "predict returned a list; return a polars DataFrame" in told()
    monkeypatch.setattr(Ratings, "predict", Recipe.predict)
    assert "defines predict(model, rows, vocabularies)" in told()


def test_a_run_stands_beside_a_constant_prediction(report: Report) -> None:
    recipe = Ratings()
    _, valid, _ = recipe.rows(recipe.data(), 0)
    batch = {name: torch.from_numpy(values) for name, values in valid.items()}
    with torch.no_grad():
        mean = dphybrid.load_model("one")(batch)["predicted"].mean()
    expected = float((batch["rating_B"] - mean).abs().mean())
    page = MetricsPage.read(load_settings().runs_dir / "one/metrics.json")
    assert page.floor["mae"] == pytest.approx(expected)


def test_a_metric_of_losses_has_no_constant_to_stand_beside() -> None:
    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        return {"mse": float(outputs["loss"].mean()), "largest": float(outputs["said"].max())}

    outputs = {"loss": torch.ones(3), "weight": torch.ones(3), "said": torch.tensor([1.0, 2.0, 6.0])}
    for metric, floor, wanted in (
        ("mse", mean_of("said"), {}),
        ("largest", mean_of("said"), {"largest": 3.0}),
        ("largest", None, {}),
    ):
        assert floor_metrics(Task(metric, True, compute, ("said",), floor=floor), outputs) == wanted


def test_vocabularies_that_are_none_are_told(unrecorded: None) -> None:
    with refused("recipe odd, test split: sample 0 is an int"):
        trained("Odd")


def test_a_third_split_is_the_test_part(unrecorded: None) -> None:
    trained("Parted")
    (run,) = dphybrid.runs()
    recipe = Parted()
    _, _, held, _ = recipe.rows(recipe.data(), 0)
    found = run.evaluate(held)
    assert found.metrics == run.test_metrics
    assert found.num_rows == 100
    assert "95% from" in found.text()
    with refused("the rows have no 'item_B', which its training split has"):
        run.evaluate({name: cells for name, cells in held.items() if name != "item_B"})
