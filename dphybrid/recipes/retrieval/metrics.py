"""Recall@k and NDCG@k of ranked items; the most popular items are the baseline.

Letters: B users, K places of a list, best first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dphybrid.training.metrics import Task


def recall_and_ndcg(found_BK: Tensor, held_B: Tensor, cutoffs: Sequence[int]) -> dict[str, float]:
    """Return the means over users by name. found_BK: is the item at a place one of the user's held-out ones?
    held_B: how many of these there are.

    recall@k is the share of the held-out items in the first k places; NDCG@k is the sum of 1 / log2(1 +
    place) over the found ones, divided by the sum for min(k, held) found at the top (Järvelin and Kekäläinen
    2002, with binary gains).
    """
    gains_K = 1 / torch.arange(2, found_BK.shape[1] + 2, dtype=torch.float64).log2()
    ideal_K = gains_K.cumsum(0)
    out = {}
    for k in cutoffs:
        first_Bk = found_BK[:, :k].double()
        out[f"recall_at_{k}"] = float((first_Bk.sum(1) / held_B).mean())
        best_B = ideal_K[held_B.clamp(max=first_Bk.shape[1]) - 1]
        out[f"ndcg_at_{k}"] = float(((first_Bk * gains_K[:k]).sum(1) / best_B).mean())
    return out


def recommending(cutoffs: Sequence[int]) -> Task:
    """Return the task: the first cutoff's NDCG decides."""

    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        return {
            **recall_and_ndcg(outputs["found_BK"], outputs["held_B"], cutoffs),
            "loss": float(outputs["loss"].double().sum() / outputs["weight"].double().sum()),
        }

    def baselines(outputs: dict[str, Tensor]) -> dict[str, dict[str, float]]:
        return {"most popular items": recall_and_ndcg(outputs["popular_BK"], outputs["held_B"], cutoffs)}

    reads = ("found_BK", "popular_BK", "held_B")
    return Task(f"ndcg_at_{cutoffs[0]}", True, compute, reads, baselines=baselines)
