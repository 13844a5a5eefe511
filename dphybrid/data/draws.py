"""Random additions to batches, such as negatives, that a resumed run draws alike.

Letters: B samples, N draws a sample.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dphybrid.data.batches import Array, Dataset

if TYPE_CHECKING:
    from torch import Tensor


class Draws:
    """Random numbers of the samples `index_B` in an epoch. seed: (seed, epoch)."""

    def __init__(self, seed: tuple[int, int], index_B: Array) -> None:
        self._seed, self._index_B = seed, index_B

    def uniform(self, num: int) -> Array:
        """Return numbers (B, num) float64 in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of each place.

        Seed, epoch, sample and column alone decide: a resumed run, another batch size, and processes that
        share a batch see the same.
        """
        start = np.random.default_rng([*self._seed, 29]).integers(2**64, dtype=np.uint64)
        place_BN = (self._index_B[:, None] * num + np.arange(num)).astype(np.uint64)
        x: Array = start + place_BN * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53

    def integers(self, low: int, high: int, num: int) -> "Tensor":
        """Return whole numbers (B, num) int64 from low to high - 1, each as likely, as `uniform` draws."""
        import torch  # the command line's help, too, imports this module

        return torch.from_numpy(low + (self.uniform(num) * (high - low)).astype(np.int64))

    def of_batch(self) -> np.random.Generator:
        """Return a generator for what the whole batch shares: (seed, epoch, the batch's first sample) decide,
        as a sample stands in one batch of an epoch only."""
        return np.random.default_rng([*self._seed, *self._index_B[:1].tolist(), 3])


Draw = Callable[["dict[str, Tensor]", Draws], "dict[str, Tensor]"]
"""From a batch and its draws to what is added to the batch, or takes the place of what it has."""


class DrawnDataset(Dataset):
    """Samples with random additions: the same in a resumed run, others in each epoch.

    samples: to which is added. draw(batch, draws): returns the additions. Tensors with samples on dim 0 have
    names that end in `_B` or `_BN`; what a whole batch shares has a name such as `negatives_K`.
    """

    def __init__(self, samples: Dataset, draw: Draw, seed: tuple[int, int] = (0, 0)) -> None:
        self.samples, self.draw, self.seed = samples, draw, seed

    def __len__(self) -> int:
        return len(self.samples)

    def at_epoch(self, seed: int, epoch: int) -> "DrawnDataset":
        return DrawnDataset(self.samples.at_epoch(seed, epoch), self.draw, (seed, epoch))

    def fetch(self, index_B: Array) -> "dict[str, Tensor]":
        batch = self.samples.fetch(index_B)
        return batch | self.draw(batch, Draws(self.seed, index_B))
