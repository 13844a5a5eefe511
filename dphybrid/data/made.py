"""Data that a function draws from a seeded generator: no files are needed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dphybrid.data.batches import Array
from dphybrid.data.store import Content, Progress, Source

Made = tuple[dict[str, Array], Mapping[str, object], str]
Maker = Callable[[np.random.Generator, int], Made]
"""From a generator and a number of rows to arrays, facts for the model, and a phrase for people."""


@dataclass(frozen=True)
class MadeSource(Source):
    """Draws rows; the training split comes first."""

    seed: int
    num_train: int
    num_valid: int
    make: Maker

    def read(self, progress: Progress, scratch: Path) -> Content:
        num_train, num_valid = self.num_train, self.num_valid
        arrays, info, words = self.make(np.random.default_rng([self.seed, 7]), num_train + num_valid)
        parts = {
            "train_rows": np.arange(num_train),
            "valid_rows": np.arange(num_train, num_train + num_valid),
        }
        lines = [f"  {words}: {num_train:,} rows to train, {num_valid:,} to validate"]
        return Content(arrays | parts, info, lines, tuple(arrays))
