"""Batches of prepared interactions: pairs to train on, users with items to find in validation.

Letters: B rows of a batch (pairs in training, users in validation), C candidates (the batch's items, then the
drawn ones), F id columns of a tower (the id itself, then its features), N pairs, U users, V items, H held-out
items of a user, S items that a user has met, L items of a user.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphybrid.data.batches import Array, Dataset, Draw, DrawnDataset, Draws


class PairDataset(Dataset):
    """Pairs to train on."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["train_pairs"])

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        users_B, items_B = self.arrays["train_pairs"][index_B].T
        return {
            "users_BF": _long(self.arrays["users_UF"][users_B]),
            "places_B": torch.arange(len(index_B)),
            "items_B": _long(items_B),
        }


def _candidates(arrays: Mapping[str, Array], num_negatives: int) -> Draw:
    """Return what gives a batch its candidates: its own items, and `num_negatives` drawn by frequency.

    Their names carry no B: a batch that is computed in parts has all of them in each part.
    """

    def draw(batch: dict[str, Tensor], draws: Draws) -> dict[str, Tensor]:
        pairs_N2 = arrays["train_pairs"]
        drawn_K = draws.of_batch().integers(0, len(pairs_N2), num_negatives)  # rows at random
        items_C = np.concatenate([batch["items_B"].numpy(), pairs_N2[drawn_K, 1]])
        return {
            "candidates_CF": _long(arrays["items_VF"][items_C]),
            "log_q_C": torch.from_numpy(arrays["log_q_V"][items_C]),
        }

    return draw


class HeldDataset(Dataset):
    """Users with items to find: those held out, and those met in training, which are not offered; both
    sorted, and as wide as the widest of the batch, with the number of items where a user has fewer."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays
        self.catalog_VF = _long(np.ascontiguousarray(arrays["items_VF"]))

    def __len__(self) -> int:
        return len(self.arrays["valid_users"])

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        a, none = self.arrays, len(self.catalog_VF)
        users_B = a["valid_users"][index_B]
        return {
            "users_BF": _long(a["users_UF"][users_B]),
            "held_BH": lists_of(a["held_starts"], a["held_items"], users_B, none),
            "seen_BS": lists_of(a["seen_starts"], a["seen_items"], users_B, none),
            "catalog_VF": self.catalog_VF,
        }


def lists_of(starts: Array, items: Array, users_B: Array, none: int) -> Tensor:
    """Return (B, longest) int64: the items of each user, items[starts[u] : starts[u + 1]], then `none`."""
    start_B, stop_B = starts[users_B], starts[users_B + 1]
    within_BL = start_B[:, None] + np.arange(max(1, int((stop_B - start_B).max(initial=0))))
    found_BL = items[np.minimum(within_BL, max(0, len(items) - 1))]
    return _long(np.where(within_BL < stop_B[:, None], found_BL, none))


def _long(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def part_of(name: str, arrays: Mapping[str, Array], info: Mapping[str, Any]) -> Dataset:
    """Return a part of prepared interactions."""
    if name == "train":
        return DrawnDataset(PairDataset(arrays), _candidates(arrays, info["negatives"]))
    return HeldDataset(arrays)
