"""A recipe to copy, with files of your own, unknown names, metrics and predictions: ratings of films.

    dphybrid train --recipe examples.films:Films --data.path ratings.csv --devices 'cpu*2'

Without `--data.path` the ratings are made up. The last letters of a tensor's name are its dimensions.
B: samples of a batch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from pydantic import Field
from torch import Tensor, nn

from dphybrid.data import Vocabulary
from dphybrid.parallel import DataParallel
from dphybrid.recipes import DataConfig, ModelConfig, ModelContext, Recipe, Task, mean_of
from dphybrid.util.errors import UserError

COLUMNS = {"user": pl.String, "item": pl.String, "rating": pl.Float32}


class Data(DataConfig):
    """Fields of the data. Each is a flag, such as `--data.path`; the sentence below it is the flag's help."""

    path: str | None = None
    """CSV file with the columns user, item and rating. Empty: made-up ratings."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the rows in the validation split."""


class Options(ModelConfig):
    """Fields of the model."""

    dim: int = Field(default=8, ge=1, le=4096)
    """Width of an embedding row."""


class Network(nn.Module):
    """Maps a batch to the loss of each sample."""

    def __init__(self, context: ModelContext[Options]) -> None:
        super().__init__()
        dim = context.options.dim
        self.users = context.table(context.num_ids("user"), dim, name="users")
        self.items = context.table(context.num_ids("item"), dim, name="items")
        # The tables stay in host memory. The module in DataParallel runs on every device, each with its share
        # of the batch; put all dense layers in here.
        self.region = DataParallel(nn.Bilinear(dim, dim, 1), context.devices)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up, by the table's attribute: dphybrid fetches the next batch's
        rows while the devices compute."""
        return {"users": batch["user_B"], "items": batch["item_B"]}

    def ratings(self, users_B: Tensor, items_B: Tensor) -> Tensor:
        """Return the predicted ratings (B,)."""
        # region.rows sends each device only the rows of its own samples.
        rows = self.region.rows(self.users, users_B), self.region.rows(self.items, items_B)
        rating_B: Tensor = self.region(*rows).squeeze(1)
        return rating_B

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss of each sample, its weight in the mean, and the outputs that the metrics read."""
        rating_B = self.ratings(batch["user_B"], batch["item_B"])
        # One loss per sample, not the mean: devices may have shares of different sizes, and the mean of their
        # means would be wrong.
        loss_B = (rating_B - batch["rating_B"].to(rating_B)).square()
        # The mean loss is sum(loss) / sum(weight); samples with several labels would have larger weights.
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "predicted": rating_B}


def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
    """Return the metrics by name. outputs: those that the task reads, of all validation samples."""
    # float64: a float32 sum over many samples would lose digits.
    error_B = (outputs["predicted"] - outputs["rating_B"]).double()
    return {"mae": float(error_B.abs().mean()), "rmse": float(error_B.square().mean().sqrt())}


class Films(Recipe):
    """Ratings that users give to films."""

    name = "films"
    summary = "Ratings that users give to films."
    data = Data
    model = Options
    # Defaults of the `train` section, where they differ from dphybrid's.
    train = {"epochs": 4, "batch_size": 64, "lr": 0.02}
    # Rows that `dphybrid.testing.check_recipe` predicts; one has an item that training does not know.
    example = {"user": ["user 1", "user 2"], "item": ["item 1", "an item without ratings"]}

    def rows(self, data: Data, seed: int) -> tuple[Any, Any, dict[str, Vocabulary]]:
        """Return the training split, the validation split (both arrays by name), and the vocabularies of
        their ids."""
        # All draws come from the seed: `check_recipe` prepares twice and compares the bytes.
        random = np.random.default_rng(seed)
        frame = _made_up(random) if data.path is None else _read(Path(data.path))
        is_valid = pl.Series(random.permutation(len(frame)) < max(1, round(data.valid_fraction * len(frame))))
        # Fitted on the training rows only: the validation split may then have unknown users, as new data may.
        train = frame.filter(~is_valid)
        vocabularies = {name: Vocabulary.fit(train[name]) for name in ("user", "item")}

        def arrays(part: pl.DataFrame) -> dict[str, Any]:
            ids = {f"{name}_B": vocabulary.ids(part[name]) for name, vocabulary in vocabularies.items()}
            return {**ids, "rating_B": part["rating"].cast(pl.Float32).to_numpy()}

        return arrays(train), arrays(frame.filter(is_valid)), vocabularies

    def build(self, context: ModelContext[Options]) -> nn.Module:
        return Network(context)

    def task(self, info: Mapping[str, object]) -> Task:
        # The metric that decides which checkpoint is the best, and what `compute` reads. floor: a constant
        # prediction, with which the model is compared.
        reads, floor = ("predicted", "rating_B"), mean_of("predicted")
        return Task("mae", higher_is_better=False, compute=compute, reads=reads, floor=floor)

    def predict(self, model: Any, rows: pl.DataFrame, vocabularies: Mapping[str, Vocabulary]) -> pl.DataFrame:
        if missing := [name for name in vocabularies if name not in rows.columns]:
            raise UserError(f"the rows have no column {missing[0]!r}; columns: {', '.join(rows.columns)}")
        # Users and items that training did not have get the row for unknown values.
        ids = {name: torch.from_numpy(words.ids(rows[name])) for name, words in vocabularies.items()}
        rating_B = model.ratings(ids["user"], ids["item"]).numpy()
        return rows.select("user", "item").with_columns(rating=rating_B)


def _read(file: Path) -> pl.DataFrame:
    try:
        frame = pl.read_csv(file, schema_overrides=COLUMNS)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"data.path={file}: cannot be read ({str(error).splitlines()[0]})") from error
    if missing := [name for name in COLUMNS if name not in frame.columns]:
        there = ", ".join(frame.columns)
        raise UserError(f"data.path={file}: has no column {missing[0]!r}; columns: {there}")
    # Rows without a user, an item or a rating cannot be learned from.
    return frame.drop_nulls(list(COLUMNS))


def _made_up(random: np.random.Generator) -> pl.DataFrame:
    # A rule to learn: about 1 where the two numbers are both even or both odd, else about -1.
    users, items = random.integers(0, 60, 4000), random.integers(0, 40, 4000)
    rating = np.where((users + items) % 2 == 0, 1.0, -1.0) + random.normal(0, 0.1, 4000)
    names = {"user": [f"user {n}" for n in users], "item": [f"item {n}" for n in items]}
    return pl.DataFrame({**names, "rating": rating})
