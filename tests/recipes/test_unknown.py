"""Ids replaced by the unknown one while training."""

import numpy as np
import pytest
import torch

from dphybrid.data.batches import ArrayDataset, DrawnDataset, batches
from dphybrid.data.table.values import UNKNOWN_ID
from dphybrid.recipes.ctr.model import some_unknown

ROWS = 4000
INFO = {"num_ids": [10, 10]}


def some(share: float) -> DrawnDataset:
    ids_BF = np.full((ROWS, 2), 7, np.int32)
    arrays = {"ids_BF": ids_BF, "dense_BN": np.zeros((ROWS, 1), np.float32)}
    return DrawnDataset(ArrayDataset(arrays, np.arange(ROWS)), some_unknown(INFO, share))


def test_a_share_of_each_column_is_replaced_anew_in_each_epoch() -> None:
    seen = [some(0.3).at_epoch(5, epoch).fetch(np.arange(ROWS))["ids_BF"] for epoch in (0, 1)]
    for ids_BF in seen:
        for column in range(2):
            replaced_B = ids_BF[:, column] == UNKNOWN_ID
            assert replaced_B.float().mean().item() == pytest.approx(0.3, abs=0.03)
            assert bool((ids_BF[~replaced_B, column] == 7).all())
    together = ((seen[0] != 7).all(1)).float().mean().item()
    assert together == pytest.approx(0.09, abs=0.02)  # the columns are drawn apart
    assert not torch.equal(*seen)


def test_a_row_is_replaced_alike_wherever_its_batch_begins_and_whoever_reads_it() -> None:
    def ids(**how: object) -> torch.Tensor:
        found = batches(some(0.3), 64, seed=1, epoch=2, shuffle=True, **how)  # type: ignore[arg-type]
        return torch.cat([batch["ids_BF"] for batch in found])

    whole = ids()
    assert torch.equal(ids(start_batch=3), whole[192:])
    halves = [ids(part=(rank, 2)) for rank in (0, 1)]
    assert torch.equal(torch.cat([halves[0][:32], halves[1][:32]]), whole[:64])
