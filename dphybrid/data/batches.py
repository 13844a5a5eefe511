"""Batches whose order is a function of (seed, epoch), so that a resumed run sees the same ones.

A data set is a view of prepared arrays: it has a length and fetches the samples of given numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray


class Dataset(ABC):
    """Samples by number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        """Return the samples of `index_B` (B,) int64 as CPU tensors with samples on dim 0."""

    def at_epoch(self, seed: int, epoch: int) -> "Dataset":
        """Return the view of an epoch."""
        return self


class ArrayDataset(Dataset):
    """Named arrays with samples on dim 0, taken as they are; part_rows: the rows that belong to this part."""

    def __init__(self, arrays: dict[str, Array], part_rows: Array) -> None:
        self.arrays = arrays
        self.part_rows = part_rows

    def __len__(self) -> int:
        return len(self.part_rows)

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        rows_B = self.part_rows[index_B]
        return {name: torch.from_numpy(_wide(np.ascontiguousarray(array[rows_B]))) for name, array in self.arrays.items()}


def _wide(array: Array) -> Array:
    """Ids are int64 wherever they are used, and smaller only on disk."""
    return array.astype(np.int64) if array.dtype == np.int32 else array


def num_batches(dataset: Dataset, batch_size: int) -> int:
    """Return the batches of an epoch, the short last one counted."""
    return -(-len(dataset) // batch_size)


def batches(
    dataset: Dataset, batch_size: int, *, seed: int, epoch: int, shuffle: bool, start_batch: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of an epoch from number `start_batch` on."""
    view = dataset.at_epoch(seed, epoch) if shuffle else dataset
    order = np.random.default_rng([seed, epoch]).permutation(len(view)) if shuffle else np.arange(len(view))
    for start in range(start_batch * batch_size, len(view), batch_size):
        yield view.fetch(order[start : start + batch_size])
