"""Generated clicks in the format of Criteo's display ads: label, 13 heavy-tailed integers, 26 hexadecimal
categories.

Categories follow Zipf's law. The log-odds of a click are known, the sum over the columns of a weight for the
value, so the best AUC that a model can reach is the AUC of these log-odds.
"""

from pathlib import Path

import numpy as np
import polars as pl

from dphybrid.data.batches import Array
from dphybrid.util.roc import area_under_roc

NUM_INTEGERS, NUM_CATEGORIES = 13, 26
VOCABULARIES = (30, 100, 1_000, 10_000, 50_000, 200_000)
"""Number of distinct values of a category column; the columns go through these sizes in turn."""
WEIGHTED = 200
"""How many of a column's most frequent values change the log-odds; rarer values carry no information."""
MISSING = 0.1
"""Share of missing values."""
_BLOCK = 100_000
"""Rows that are drawn and written at once."""


def write_clicks(file: Path, num_rows: int, seed: int = 0) -> float:
    """Write a CSV file of clicks, block by block; return the AUC of the true log-odds. The same seed gives
    the same bytes."""
    random = np.random.default_rng([seed, 0])
    columns = [_Categories(random, VOCABULARIES[i % len(VOCABULARIES)]) for i in range(NUM_CATEGORIES)]
    slopes = random.normal(0, 0.25, NUM_INTEGERS)
    names = [
        "label",
        *(f"I{i + 1}" for i in range(NUM_INTEGERS)),
        *(f"C{i + 1}" for i in range(NUM_CATEGORIES)),
    ]
    labels, odds = [], []
    with file.open("wb") as stream:
        for number, start in enumerate(range(0, num_rows, _BLOCK)):
            # Seeded by its number, so that a block does not depend on those before it.
            random = np.random.default_rng([seed, 1, number])
            rows = min(_BLOCK, num_rows - start)
            logit_B = np.full(rows, -1.2)
            series: dict[str, pl.Series] = {}
            for i in range(NUM_INTEGERS):
                value_B = random.normal(0, 1, rows)
                missing_B = random.random(rows) < MISSING
                series[names[1 + i]] = pl.Series(np.expm1(1.5 + 1.2 * value_B).astype(np.int64)).set(
                    pl.Series(missing_B), None
                )
                logit_B += np.where(missing_B, 0.0, slopes[i] * value_B)
            for i, column in enumerate(columns):
                series[names[1 + NUM_INTEGERS + i]], weight_B = column.draw(random, rows)
                logit_B += weight_B
            label_B = (random.random(rows) < 1 / (1 + np.exp(-logit_B))).astype(np.int64)
            pl.DataFrame({"label": label_B, **series}).select(names).write_csv(
                stream, include_header=number == 0
            )
            labels.append(label_B)
            odds.append(logit_B)
    return area_under_roc(np.concatenate(labels), np.concatenate(odds))


class _Categories:
    """A column of hexadecimal values, the most frequent first; the first `WEIGHTED` have a weight."""

    def __init__(self, random: np.random.Generator, size: int) -> None:
        # Of many codes, twice as many as needed are drawn, because duplicates drop out.
        codes = (
            random.choice(2**32, size=size, replace=False)
            if size < 1000
            else np.unique(random.integers(0, 2**32, 2 * size))
        )
        codes = random.permutation(codes)[:size]
        self.values = pl.Series([f"{code:08x}" for code in codes.tolist()])
        self.weights = np.zeros(size)
        self.weights[:WEIGHTED] = random.normal(0, 0.35, min(size, WEIGHTED))
        share = 1 / np.arange(1, size + 1) ** 1.05
        self.upto = np.cumsum(share / share.sum())

    def draw(self, random: np.random.Generator, rows: int) -> tuple[pl.Series, Array]:
        # minimum: rounding can leave the last cumulative share below 1.
        place_B = np.minimum(np.searchsorted(self.upto, random.random(rows)), len(self.values) - 1)
        missing_B = random.random(rows) < MISSING
        return self.values[place_B].set(pl.Series(missing_B), None), np.where(
            missing_B, 0.0, self.weights[place_B]
        )
