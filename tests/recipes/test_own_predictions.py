"""Vocabularies, predictions and the baseline of a recipe of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

import dphybrid
from dphybrid.data import Vocabulary
from dphybrid.parallel import DataParallel
from dphybrid.recipes import ModelContext, Recipe, Task
from dphybrid.run.pages import MetricsPage
from dphybrid.training.metrics import constant_prediction
from dphybrid.util.errors import UserError
from tests.commands import command, run_with
from tests.refusing import refused

pytestmark = pytest.mark.usefixtures("unrecorded")


class Net(torch.nn.Module):
    def __init__(self, context: ModelContext[Any]) -> None:
        super().__init__()
        self.cities = context.table(context.num_ids("from", "to"), 4, name="cities")
        self.region = DataParallel(torch.nn.Bilinear(4, 4, 1), context.devices)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hours_B = self.region(self.cities(batch["from"]), self.cities(batch["to"])).squeeze(1)
        loss_B = (hours_B - batch.get("hours", torch.zeros(())).to(hours_B)).square()
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "said": hours_B}


class Trips(Recipe):
    name = "trips"
    train = {"epochs": 2, "batch_size": 50}

    def rows(self, data: Any, seed: int) -> Any:
        random = np.random.default_rng(seed)
        where = random.integers(0, 20, (400, 2))
        cities = Vocabulary.fit(np.char.add("city ", where[:300].astype(str)))
        ids = cities.ids(np.char.add("city ", where.astype(str)))
        columns = {"from": ids[:, 0], "to": ids[:, 1], "hours": (where.sum(1) % 3).astype(np.float32)}
        parts = (slice(300), slice(300, 400))
        split = [{name: values[part] for name, values in columns.items()} for part in parts]
        return (*split, {"city": cities, "from": cities})

    def build(self, context: ModelContext[Any]) -> torch.nn.Module:
        return Net(context)

    def task(self, info: Mapping[str, Any]) -> Task:
        def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
            error_B = (outputs["said"] - outputs["hours"]).abs()
            return {"mae": float(error_B.mean()), "loss": float(outputs["loss"].mean())}

        return Task("mae", False, compute, ("said", "hours"), prediction="said")

    def predict(self, model: Any, rows: pl.DataFrame, vocabularies: Mapping[str, Vocabulary]) -> pl.DataFrame:
        if "from" not in rows.columns:
            raise UserError(f"column from is missing; columns: {', '.join(rows.columns)}")
        batch = {name: torch.from_numpy(vocabularies["city"].ids(rows[name])) for name in ("from", "to")}
        return pl.DataFrame({"hours": model(batch)["said"].numpy()})


class Mute(Trips):
    name = "mute"
    predict = Recipe.predict


class Chatty(Trips):
    name = "chatty"

    def predict(self, model: Any, rows: Any, vocabularies: Any) -> Any:
        return [1.0]


class Odd(Trips):
    name = "odd"

    def rows(self, data: Any, seed: int) -> Any:
        return (*super().rows(data, seed)[:2], [1])


PREDICT = ("predict", "one", "--data.path", "trips.csv")


def trained(recipe: str = "Trips") -> Any:
    return run_with(f"recipe={__name__}:{recipe}", "devices=cpu*2", run_name="one")


def test_a_file_is_predicted_with_the_vocabulary_of_training(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = trained()
    assert "vocabulary city: 22 rows" in capsys.readouterr().out
    assert dphybrid.load_model("one").cities.num_rows == 22
    rows = pl.DataFrame(
        {"from": ["city 3", "Atlantis", None], "to": ["city 4", "city 4", "city 4"], "day": [1, 2, 3]}
    )
    found = dphybrid.load("one").predict(rows)
    (data_dir / "prepared").rename(data_dir / "gone")  # the checkpoint has all that is needed
    again = dphybrid.load(report.best_checkpoint, batch_size=2).predict(rows.to_dict(as_series=False))
    assert again.equals(found)
    model, city = dphybrid.load_model("one"), Vocabulary(dphybrid.load("one").vocabularies["city"].values)
    with torch.no_grad():
        three, four = (city.ids(f"city {number}").item() for number in (3, 4))
        ids = {"from": torch.tensor([three, 1, 0]), "to": torch.tensor([four] * 3)}
        assert found["hours"].to_list() == model(ids)["said"].tolist()
    rows.write_csv("trips.csv")
    assert "Predictions of 3 rows: out.csv" in command(*PREDICT, "--out", "out.csv", "--keep", "day")
    written = pl.read_csv("out.csv")
    assert written["day"].to_list() == [1, 2, 3]
    assert written["hours"].to_list() == pytest.approx(found["hours"].to_list(), rel=1e-6)
    assert command(*PREDICT).splitlines()[0] == "hours"


@pytest.mark.parametrize(
    ("recipe", "flags", "words"),
    [
        ("Mute", (), "defines predict(model, rows, vocabularies)"),
        ("Chatty", (), "predict returned a list; return a polars DataFrame"),
        ("Trips", ("--threshold", "0.5"), "this recipe's predict decides"),
        ("Trips", ("--top", "5"), "top: is not an option of recipe trips's predictions"),
        ("Trips", ("--keep", "price"), "trips.csv has no such column"),
        ("Trips", ("--data.delimiter", ";"), "column from is missing"),
    ],
)
def test_what_cannot_be_predicted_is_told(recipe: str, flags: tuple[str, ...], words: str) -> None:
    trained(recipe)
    Path("trips.csv").write_text("from,to\ncity 1,city 2\n")
    assert words in " ".join(command(*PREDICT, "--out", "out.csv", *flags, ends=2).split())
    assert not Path("out.csv").exists()


def test_a_run_stands_beside_a_constant_prediction(data_dir: Path) -> None:
    trained()
    _, valid, _ = Trips().rows(None, 0)
    batch = {name: torch.from_numpy(values) for name, values in valid.items()}
    with torch.no_grad():
        mean = dphybrid.load_model("one")(batch)["said"].mean()
    expected = float((batch["hours"] - mean).abs().mean())
    page = MetricsPage.read(data_dir / "runs/one/metrics.json")
    assert page.beside.startswith(f"constant prediction mae {expected:.4f} (this run is ")


def test_a_metric_of_losses_has_no_constant_to_stand_beside() -> None:
    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        return {"mse": float(outputs["loss"].mean()), "largest": float(outputs["said"].max())}

    outputs = {"loss": torch.ones(3), "weight": torch.ones(3), "said": torch.tensor([1.0, 2.0, 6.0])}
    by_loss = Task("mse", False, compute, ("said",), prediction="said")
    assert constant_prediction(outputs, by_loss) == {}
    by_output = Task("largest", True, compute, ("said",), prediction="said")
    assert constant_prediction(outputs, by_output) == {"constant prediction": {"largest": 3.0}}
    assert constant_prediction(outputs, Task("largest", True, compute, ("said",))) == {}


def test_vocabularies_that_are_none_are_told() -> None:
    with refused("recipe odd: rows.. returned a tuple; return .training split"):
        trained("Odd")
