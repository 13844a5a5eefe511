"""The data: a CSV file with a user, an item and a rating in each row, or made-up ratings."""

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
    """Fields of the data. Each is a flag, such as `--data.path`; the sentence below it is the flag's help."""

    path: str | None = None
    """CSV file with the columns user, item and rating. Empty: made-up ratings."""
    valid_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the rows in the validation split."""


def read(data: Data, seed: int) -> tuple[Any, Any, dict[str, Vocabulary]]:
    """Return the training split, the validation split (both arrays by name), and the vocabularies of their
    ids."""
    # All draws come from the seed: `dphybrid.testing.check_recipe` prepares twice and compares the bytes.
    random = np.random.default_rng(seed)
    frame = _made_up(random) if data.path is None else _ratings(Path(data.path))
    is_valid = pl.Series(random.permutation(len(frame)) < max(1, round(data.valid_fraction * len(frame))))
    # Fitted on the training rows only: the validation split may then have unknown users, as new data may.
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
    # Rows without a user, an item or a rating cannot be learned from.
    return frame.drop_nulls(list(COLUMNS))


def _made_up(random: np.random.Generator) -> pl.DataFrame:
    # A rule to learn: about 1 where the two numbers are both even or both odd, else about -1.
    users, items = random.integers(0, 60, 4000), random.integers(0, 40, 4000)
    rating = np.where((users + items) % 2 == 0, 1.0, -1.0) + random.normal(0, 0.1, 4000)
    return pl.DataFrame(
        {"user": [f"user {n}" for n in users], "item": [f"item {n}" for n in items], "rating": rating}
    )
