"""The recipe: one object that tells dphybrid how to read the data, build the model, judge and predict."""

from collections.abc import Mapping
from typing import Any

import polars as pl
import torch

from dphybrid.data import Vocabulary
from dphybrid.recipes import ModelContext, Recipe, Task
from dphybrid.util.errors import UserError

from .model import TASK, Network, Options
from .reader import Data, read


class NewRecipe(Recipe):
    """Ratings that users give to items."""

    name = "newrecipe"
    summary = "Ratings that users give to items."
    data = Data
    model = Options
    # Defaults of the `train` section, where they differ from dphybrid's.
    train = {"epochs": 4, "batch_size": 64, "lr": 0.02}
    # Rows that `dphybrid.testing.check_recipe` predicts; one has an item that training does not know.
    example = {"user": ["user 1", "user 2"], "item": ["item 1", "an item without ratings"]}

    def rows(self, data: Data, seed: int) -> tuple[Any, Any, dict[str, Vocabulary]]:
        return read(data, seed)

    def build(self, context: ModelContext[Options]) -> torch.nn.Module:
        return Network(context)

    def task(self, info: Mapping[str, object]) -> Task:
        return TASK

    def predict(self, model: Any, rows: pl.DataFrame, vocabularies: Mapping[str, Vocabulary]) -> pl.DataFrame:
        if missing := [name for name in vocabularies if name not in rows.columns]:
            raise UserError(f"the rows have no column {missing[0]!r}; columns: {', '.join(rows.columns)}")
        # Users and items that training did not have get the row for unknown values.
        ids = {name: torch.from_numpy(words.ids(rows[name])) for name, words in vocabularies.items()}
        return rows.select("user", "item").with_columns(
            rating=model.ratings(ids["user"], ids["item"]).numpy()
        )
