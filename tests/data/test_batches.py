"""The order of an epoch and the draws of batches are the same from any batch on."""

import numpy as np
import pytest
import torch

from dphybrid.data.batches import (
    BLOCK_ROWS,
    ArrayDataset,
    DrawnDataset,
    Draws,
    batches,
    shuffled_windows,
)

MANY = 10 * BLOCK_ROWS + 1234
WINDOW = 3 * BLOCK_ROWS + 5


def order(num_rows: int, window_rows: int, seed: int = 1, epoch: int = 2, skipped: int = 0) -> np.ndarray:
    return np.concatenate([np.arange(0), *shuffled_windows(num_rows, seed, epoch, window_rows, skipped)])


@pytest.mark.parametrize(
    "num_rows", [0, 1, 100, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 6 * BLOCK_ROWS, MANY]
)
@pytest.mark.parametrize("window_rows", [1, BLOCK_ROWS, WINDOW, 10**9])
def test_every_row_comes_once_in_an_order_of_seed_and_epoch(num_rows: int, window_rows: int) -> None:
    found = order(num_rows, window_rows)
    assert np.array_equal(np.sort(found), np.arange(num_rows))
    assert np.array_equal(found, order(num_rows, window_rows))
    if num_rows > 1:
        assert not np.array_equal(found, order(num_rows, window_rows, epoch=3))
        assert not np.array_equal(found, order(num_rows, window_rows, seed=2))
    for skipped in (1, num_rows // 2, num_rows):
        assert np.array_equal(order(num_rows, window_rows, skipped=skipped), found[skipped:])


def test_few_rows_are_shuffled_as_one() -> None:
    assert np.array_equal(order(1000, 1000), np.random.default_rng([1, 2]).permutation(1000))


def test_a_window_reads_few_long_runs_and_mixes_them() -> None:
    windows = list(shuffled_windows(MANY, 1, 2, WINDOW))
    assert [len(window) for window in windows] == [3 * BLOCK_ROWS] * 3 + [BLOCK_ROWS + 1234]
    for window in windows:
        blocks = np.unique(window // BLOCK_ROWS)
        assert len(blocks) <= 3  # read from three places of the file, though its rows are mixed
        assert len(np.unique(window[:100] // BLOCK_ROWS)) == len(blocks)
        assert np.abs(np.diff(window)).min() >= 1
        assert (np.diff(window) == 1).mean() < 0.01
    neighbours = [set(np.unique(window // BLOCK_ROWS).tolist()) for window in windows]
    assert neighbours != [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10}]


@pytest.mark.parametrize("batch_size", [7, 1000, BLOCK_ROWS, 5 * BLOCK_ROWS])
def test_batches_go_on_from_any_number(batch_size: int) -> None:
    data = ArrayDataset({"row_B": np.arange(MANY)}, np.arange(MANY))

    def rows(start: int) -> list[list[int]]:
        found = batches(
            data, batch_size, seed=1, epoch=0, shuffle=True, start_batch=start, shuffle_rows=WINDOW
        )
        return [batch["row_B"].tolist() for batch in found]

    everything = rows(0)
    assert {len(batch) for batch in everything[:-1]} <= {batch_size}
    assert sorted(row for batch in everything for row in batch) == list(range(MANY))
    for start in (1, len(everything) // 2, len(everything) - 1, len(everything)):
        assert rows(start) == everything[start:]


def drawn() -> DrawnDataset:
    def draw(batch: dict[str, torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        shared = torch.from_numpy(draws.of_batch().integers(0, 100, 3))
        return {"negatives_BN": draws.integers(5, 15, 4), "shared_K": shared}

    return DrawnDataset(ArrayDataset({"ids_B": np.arange(1000)}, np.arange(1000)), draw)


def seen(name: str, size: int = 50, epoch: int = 1, **how: object) -> list[torch.Tensor]:
    found = batches(drawn(), size, seed=7, epoch=epoch, shuffle=True, **how)  # type: ignore[arg-type]
    return [batch[name] for batch in found]


def test_a_sample_has_the_same_negatives_in_any_batch() -> None:
    whole = torch.cat(seen("negatives_BN"))
    assert torch.equal(torch.cat(seen("negatives_BN", size=33)), whole)
    assert torch.equal(torch.cat(seen("negatives_BN", start_batch=6)), whole[300:])
    assert not torch.equal(torch.cat(seen("negatives_BN", epoch=2)), whole)
    counts = torch.bincount(whole.flatten(), minlength=15)
    assert counts[:5].sum() == 0
    assert (counts[5:].double() / whole.numel() - 0.1).abs().max() < 0.02
    assert abs(float(torch.corrcoef(whole[:, :2].double().T)[0, 1])) < 0.1


def test_each_draw_is_another_one_and_the_same_in_a_resumed_run() -> None:
    def drawn() -> list[np.ndarray]:
        draws = Draws((7, 1), np.arange(1000))
        heads, tails = draws.integers(0, 1000, 3), draws.integers(0, 1000, 3)
        shared = [draws.of_batch().integers(0, 1000, 50) for _ in range(2)]
        return [heads.numpy(), tails.numpy(), draws.uniform(3), *shared]

    first, second, third, shared, other = drawn()
    for one, two in ((first, second), (second / 1000, third)):
        assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.06
    assert not np.array_equal(shared, other)
    assert all(map(np.array_equal, drawn(), (first, second, third, shared, other)))


def test_the_first_columns_of_a_draw_are_the_same_numbers() -> None:
    one, two = (Draws((7, 1), np.array([5, 0, 2**40, 7])) for _ in range(2))
    for _ in range(2):
        assert np.array_equal(one.uniform(999, first=7), two.uniform(999)[:, :7])


def test_what_a_batch_shares_is_of_the_batch() -> None:
    whole = seen("shared_K")
    assert all(map(torch.equal, seen("shared_K", start_batch=6), whole[6:]))
    assert len({tuple(one.tolist()) for one in whole}) > 15
