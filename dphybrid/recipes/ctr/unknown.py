"""Ids replaced by the unknown one while training: what comes in place of a value that was never met must be
learnt, too.

Letters: B samples, F id columns.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphybrid.data.batches import Array, Dataset
from dphybrid.data.table.kinds import MISSING_ID, UNKNOWN_ID


class SomeUnknown(Dataset):
    """Training rows with a share of their ids replaced, other ones in each epoch.

    Seed, epoch, row and column alone decide: a resumed run, and one whose batches several processes share,
    sees the same.
    """

    def __init__(
        self, rows: Dataset, info: Mapping[str, Any], share: float, key: tuple[int, int] = (0, 0)
    ) -> None:
        self.rows, self.info, self.share, self.key = rows, info, share, key
        num_columns = len(info["num_ids"]) - int(info.get("num_bags", 0))
        roles = [column["role"] for column in info.get("columns", [])] or ["categorical"] * num_columns
        self._stand_in_F = torch.tensor(
            [MISSING_ID if role == "buckets" else UNKNOWN_ID for role in roles[:num_columns]],
            dtype=torch.int64,  # also where all columns are bags
        )

    def __len__(self) -> int:
        return len(self.rows)

    def at_epoch(self, seed: int, epoch: int) -> "SomeUnknown":
        return SomeUnknown(self.rows.at_epoch(seed, epoch), self.info, self.share, (seed, epoch))

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        batch = self.rows.fetch(index_B)
        replaced_BF = torch.from_numpy(self._draw(index_B) < self.share)
        return batch | {"ids_BF": torch.where(replaced_BF, self._stand_in_F, batch["ids_BF"])}

    def _draw(self, index_B: Array) -> Array:
        """Return numbers (B, F) in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of each place."""
        columns = len(self._stand_in_F)
        start = np.random.default_rng([*self.key, 29]).integers(2**64, dtype=np.uint64)
        place_BF = (index_B[:, None] * columns + np.arange(columns)).astype(np.uint64)
        x: Array = start + place_BF * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
