"""The data: a CSV file with user, item and rating in each row, or made-up ratings."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from pydantic import Field

from dphybrid.data import Vocabulary
from dphybrid.recipes import DataConfig
from dphybrid.util.errors import UserError

COLUMNS = {"user": pl.String, "item": pl.String, "rating": pl.Float32}


class Data(DataConfig):
    """Each field is a flag, `--data.path`; the sentence below it is its help."""

    path: str | None = None
    """CSV file with the columns user, item and rating. Empty: made-up ratings."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the rows in the validation split."""


def read(data: Data, seed: int) -> tuple[Any, Any, dict[str, Vocabulary]]:
    """Return the training and the validation split as arrays by name, and the vocabularies of their ids."""
    random = np.random.default_rng(seed)
    frame = _made_up(random) if data.path is None else _ratings(Path(data.path))
    is_valid = pl.Series(random.permutation(len(frame)) < max(1, round(data.valid_fraction * len(frame))))
    # Vocabularies of the training rows alone: validation meets unknown users, as predictions do.
    train = frame.filter(~is_valid)
    vocabularies = {name: Vocabulary.fit(train[name]) for name in ("user", "item")}

    def arrays(part: pl.DataFrame) -> dict[str, Any]:
        ids = {f"{name}_B": vocabulary.ids(part[name]) for name, vocabulary in vocabularies.items()}
        return {**ids, "rating_B": part["rating"].cast(pl.Float32).to_numpy()}

    return arrays(train), arrays(frame.filter(is_valid)), vocabularies


def _ratings(file: Path) -> pl.DataFrame:
    try:
        frame = pl.read_csv(file, schema_overrides=COLUMNS)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"data.path={file}: cannot be read ({str(error).splitlines()[0]})") from error
    if missing := [name for name in COLUMNS if name not in frame.columns]:
        raise UserError(
            f"data.path={file}: has no column {missing[0]!r}; columns: {', '.join(frame.columns)}"
        )
    return frame.drop_nulls(list(COLUMNS))


def _made_up(random: np.random.Generator) -> pl.DataFrame:
    users, items = random.integers(0, 60, 4000), random.integers(0, 40, 4000)
    rating = np.where((users + items) % 2 == 0, 1.0, -1.0) + random.normal(0, 0.1, 4000)
    return pl.DataFrame(
        {"user": [f"user {n}" for n in users], "item": [f"item {n}" for n in items], "rating": rating}
    )
