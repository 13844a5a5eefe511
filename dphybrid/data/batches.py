"""Batches whose order depends only on (seed, epoch), so that a resumed run sees the same ones.

A data set is a view of prepared arrays: it has a length and fetches samples by their numbers. A
`DrawnDataset` adds random parts, such as negatives, which a resumed run draws alike.

Letters: B samples, N draws per sample.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray

BLOCK_ROWS = 4096
"""Size of the blocks of neighbouring rows that go to one window when an epoch is shuffled in windows."""


class Dataset(ABC):
    """Samples that are fetched by number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, index_B: Array) -> "dict[str, Tensor]":
        """Return the samples of `index_B` (B,) int64 as CPU tensors with samples on dim 0."""

    def at_epoch(self, seed: int, epoch: int) -> "Dataset":
        """Return the data set as one epoch sees it. Data sets without random parts are the same in each."""
        return self


class ArrayDataset(Dataset):
    """Named arrays with samples on dim 0. part_rows: the rows of this part, such as the training rows."""

    def __init__(self, arrays: dict[str, Array], part_rows: Array) -> None:
        self.arrays = arrays
        self.part_rows = part_rows

    def __len__(self) -> int:
        return len(self.part_rows)

    def fetch(self, index_B: Array) -> "dict[str, Tensor]":
        import torch  # here, as `--help` imports this module and torch takes seconds

        rows_B = self.part_rows[index_B]
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(array[rows_B])) for name, array in self.arrays.items()
        }
        # Ids are int64 everywhere; int32 is only their smaller form on disk.
        return {name: rows.long() if rows.dtype == torch.int32 else rows for name, rows in tensors.items()}


def evenly_spaced(rows: int, most: int) -> Array:
    """Return the numbers of all rows, or of `most` evenly spaced ones: (B,) int64."""
    return np.arange(rows) if rows <= most else np.linspace(0, rows - 1, most).astype(np.int64)


class Draws:
    """Random numbers for the samples `index_B` of an epoch. seed: (seed, epoch).

    Each call draws other numbers than the calls before it, so the order of the calls counts.
    """

    def __init__(self, seed: tuple[int, int], index_B: Array) -> None:
        self._seed, self._index_B = seed, index_B
        self._calls: Counter[int] = Counter()

    def _key(self, kind: int, *of: int) -> tuple[int, ...]:
        """Return the seed of the next call of a kind. kind: keeps these streams apart from each other, and
        from the one that shuffles, which has (seed, epoch) alone."""
        number = self._calls[kind]
        self._calls[kind] += 1
        # The first call has no number, as when there was only one: a run that goes on sees the same numbers.
        return *self._seed, *of, kind, *([number] if number else [])

    def uniform(self, num: int, first: int | None = None) -> Array:
        """Return numbers (B, num) float64 in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of a counter.
        first: compute only so many columns of them.

        They depend only on seed, epoch, call, sample and column: a resumed run, another batch size, and
        processes that share a batch see the same numbers.
        """
        columns = np.arange(num if first is None else first)
        x: Array = (self._index_B[:, None] * num + columns).astype(np.uint64)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(_start_of(self._key(29)))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
        x ^= x >> np.uint64(31)
        # The top 53 bits: as many as a float64 holds.
        return (x >> np.uint64(11)) * 2.0**-53

    def integers(self, low: int, high: int, num: int) -> "Tensor":
        """Return whole numbers (B, num) int64 from low to high - 1, all equally likely; see `uniform`."""
        import torch  # here, as `--help` imports this module and torch takes seconds

        return torch.from_numpy(low + (self.uniform(num) * (high - low)).astype(np.int64))

    def of_batch(self) -> np.random.Generator:
        """Return a generator for numbers that the whole batch shares. Its seed is (seed, epoch, the batch's
        first sample, the call); a sample is in only one batch of an epoch."""
        return np.random.default_rng(self._key(3, *self._index_B[:1].tolist()))


@lru_cache(maxsize=64)  # all batches of an epoch have the same ones, and a generator takes 0.1 ms
def _start_of(key: tuple[int, ...]) -> int:
    return int(np.random.default_rng(key).integers(2**64, dtype=np.uint64))


Draw = Callable[["dict[str, Tensor]", Draws], "dict[str, Tensor]"]
"""Takes a batch and its draws; returns the tensors to add to the batch or to replace in it, by name."""


class DrawnDataset(Dataset):
    """Samples with random additions, which differ in each epoch and are the same in a resumed run.

    samples: the data set to add to. draw(batch, draws): returns the additions. Names of tensors with samples
    on dim 0 end in `_B` or `_BN`; a tensor that the whole batch shares has a name such as `negatives_K`.
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


def part_of(num_rows: int, part: tuple[int, int]) -> slice:
    """Return the slice of a batch that process part[0] of part[1] processes gets; slices are in order and
    differ by at most one row."""
    number, count = part
    return slice(number * num_rows // count, (number + 1) * num_rows // count)


def num_batches(dataset: Dataset, batch_size: int) -> int:
    """Return the number of batches of an epoch, including a short last one."""
    return -(-len(dataset) // batch_size)


def batches(
    dataset: Dataset,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    start_batch: int = 0,
    shuffle_rows: int | None = None,
    part: tuple[int, int] = (0, 1),
) -> "Iterator[dict[str, Tensor]]":
    """Yield the batches of an epoch from number `start_batch` on. shuffle_rows: how many rows to shuffle at
    once (None: all), see `shuffled_windows`. part: yield only this process's rows of each batch, see
    `part_of`."""
    # Without shuffling (validation), every epoch draws alike, so that its metrics can be compared.
    view = dataset.at_epoch(seed, epoch) if shuffle else dataset
    if not shuffle:
        for start in range(start_batch * batch_size, len(view), batch_size):
            index_B = np.arange(start, min(start + batch_size, len(view)))
            yield view.fetch(index_B[part_of(len(index_B), part)])
        return
    rest = np.arange(0)
    for window in shuffled_windows(
        len(view), seed, epoch, shuffle_rows or len(view), start_batch * batch_size
    ):
        # Rows that do not fill a batch are put in front of the next window.
        rest = np.concatenate([rest, window])
        whole = len(rest) - len(rest) % batch_size
        for start in range(0, whole, batch_size):
            yield view.fetch(rest[start : start + batch_size][part_of(batch_size, part)])
        rest = rest[whole:]
    if len(rest):
        yield view.fetch(rest[part_of(len(rest), part)])


def shuffled_windows(
    num_rows: int, seed: int, epoch: int, window_rows: int, skipped: int = 0
) -> Iterator[Array]:
    """Yield the numbers 0 to num_rows - 1 in the order of an epoch, at most `window_rows` (rounded to blocks)
    at a time, without the first `skipped` ones.

    Up to `window_rows` rows are shuffled as a whole. With more, blocks of `BLOCK_ROWS` neighbours are dealt
    to windows in random order, and rows are shuffled within their window. A file larger than memory is then
    read in long runs, and no permutation of all rows has to be kept.
    """
    random = np.random.default_rng([seed, epoch])
    if num_rows <= window_rows:
        yield random.permutation(num_rows)[skipped:]
        return
    blocks_of_window = max(1, window_rows // BLOCK_ROWS)
    starts = random.permutation(num_rows // BLOCK_ROWS) * BLOCK_ROWS
    whole = len(starts) * BLOCK_ROWS
    for number, first in enumerate(range(0, max(1, len(starts)), blocks_of_window)):
        window_starts = starts[first : first + blocks_of_window]
        rows = (window_starts[:, None] + np.arange(BLOCK_ROWS)).ravel()
        # The last window also takes the rows of the last, incomplete block.
        if first + blocks_of_window >= len(starts):
            rows = np.concatenate([rows, np.arange(whole, num_rows)])
        # A generator per window, so that a resumed run need not shuffle the windows that it skips.
        if skipped < len(rows):
            yield np.random.default_rng([seed, epoch, number]).permutation(rows)[skipped:]
        skipped = max(0, skipped - len(rows))
