"""Made-up clicks in the Criteo display format, with a planted answer: label, 13 heavy-tailed integers, 26
hexadecimal categories.

Categories follow Zipf's law. The log-odds of a click are a sum over columns of a weight for the value, so the
best AUC that any model can reach is that of the log-odds themselves.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dphybrid.data.batches import Array

NUM_INTEGERS, NUM_CATEGORIES = 13, 26
VOCABULARIES = (30, 100, 1_000, 10_000, 50_000, 200_000)
"""Distinct values a category column is drawn from, repeated over the columns."""
WEIGHTED = 200
"""Most frequent values of a column that carry a weight; rarer ones say nothing of the answer."""
MISSING = 0.1
"""Share of values left out."""
_BLOCK = 100_000


@dataclass(frozen=True)
class PlantedClicks:
    """What was written. best_auc: of the true log-odds against all labels."""

    file: Path
    num_rows: int
    best_auc: float
    click_rate: float


def write_clicks(file: Path, num_rows: int, seed: int = 0, *, header: bool = True) -> PlantedClicks:
    """Write a CSV file of clicks block by block; the same seed gives the same bytes. Says what the best AUC
    is."""
    from sklearn.metrics import roc_auc_score

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
                stream, include_header=header and number == 0
            )
            labels.append(label_B)
            odds.append(logit_B)
    label_B, logit_B = np.concatenate(labels), np.concatenate(odds)
    return PlantedClicks(file, num_rows, float(roc_auc_score(label_B, logit_B)), float(label_B.mean()))


class _Categories:
    """A column of hexadecimal values by frequency, the first ones with a weight."""

    def __init__(self, random: np.random.Generator, size: int) -> None:
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
        place_B = np.minimum(np.searchsorted(self.upto, random.random(rows)), len(self.values) - 1)
        missing_B = random.random(rows) < MISSING
        return self.values[place_B].set(pl.Series(missing_B), None), np.where(
            missing_B, 0.0, self.weights[place_B]
        )
