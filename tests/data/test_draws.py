"""Draws of batches: by sample, by batch, the same wherever an epoch goes on."""

import numpy as np
import torch

from dphybrid.data import DrawnDataset, Draws, batches
from dphybrid.data.batches import ArrayDataset

ROWS = 1000


def drawn() -> DrawnDataset:
    def draw(batch: dict[str, torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        shared = torch.from_numpy(draws.of_batch().integers(0, 100, 3))
        return {"negatives_BN": draws.integers(5, 15, 4), "shared_K": shared}

    return DrawnDataset(ArrayDataset({"ids_B": np.arange(ROWS)}, np.arange(ROWS)), draw)


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


def test_what_a_batch_shares_is_of_the_batch() -> None:
    whole = seen("shared_K")
    assert all(map(torch.equal, seen("shared_K", start_batch=6), whole[6:]))
    assert len({tuple(one.tolist()) for one in whole}) > 15
