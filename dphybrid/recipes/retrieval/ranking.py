"""Evaluation of recommendations: looks for the held-out items of users among all items that they have not
met.

Letters: B users, E width of a vector, V items, H held-out items of a user, S items that a user has met, K
places of a list.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dphybrid.embedding.ranking import Best, score_blocks
from dphybrid.training.metrics import Task


@torch.no_grad()
def rank_held(users_BE: Tensor, items_VE: Tensor, batch: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Look for the held-out items among the `depth` best ones of those that the user has not met. The loss is
    that of a softmax over all of those, summed over the held-out items.

    batch: held_BH and seen_BS, sorted and padded with V.
    """
    held_BH, seen_BS = batch["held_BH"].to(users_BE.device), batch["seen_BS"].to(users_BE.device)
    best, held_scores_BH = Best(users_BE, depth), users_BE.new_zeros(held_BH.shape)
    total_B = users_BE.new_full((len(users_BE),), -torch.inf)
    for start, scores_BV in score_blocks(users_BE, items_VE, seen_BS):
        best.add(start, scores_BV)
        total_B = torch.logaddexp(total_B, scores_BV.logsumexp(1))
        # For a held-out item of another block the place is that of the padded column, which adds 0.
        offset_BH, size = held_BH - start, scores_BV.shape[1]
        offset_BH = offset_BH.where((offset_BH >= 0) & (offset_BH < size), size)
        held_scores_BH += F.pad(scores_BV, (0, 1)).gather(1, offset_BH)
    is_held_BH = held_BH < len(items_VE)  # the others are padding
    loss_BH = (total_B.unsqueeze(1) - held_scores_BH) * is_held_BH
    place_BK = torch.searchsorted(held_BH, best.rows_QK).clamp(max=held_BH.shape[1] - 1)
    return {
        "loss": loss_BH.sum(1),
        "weight": is_held_BH.sum(1).to(loss_BH),
        "found_BK": held_BH.gather(1, place_BK) == best.rows_QK,
        "popular_BK": _popular_found(held_BH, seen_BS, len(items_VE), depth),
        "held_B": is_held_BH.sum(1),
    }


def _popular_found(held_BH: Tensor, seen_BS: Tensor, num_items: int, k: int) -> Tensor:
    """Return found_BK for the list of the k most popular items (those with the smallest numbers) that a user
    has not met. Both inputs are sorted and padded with `num_items`."""
    # An item's place in that list is its number, less the smaller numbers that the user has met.
    offset_BH = held_BH - torch.searchsorted(seen_BS, held_BH)
    offset_BH = offset_BH.where((held_BH < num_items) & (offset_BH < k), k)
    # Column k takes the items beyond the list, and is cut off.
    found_BK = torch.zeros(len(held_BH), k + 1, dtype=torch.bool, device=held_BH.device)
    return found_BK.scatter(1, offset_BH, True)[:, :k]


def recall_and_ndcg(found_BK: Tensor, held_B: Tensor, cutoffs: Sequence[int]) -> dict[str, float]:
    """Return the means over users, by metric. found_BK: whether the item at each place of a user's list is
    held out. held_B: how many items are held out.

    recall@k is the share of the held-out items in the first k places. NDCG@k is the sum of 1 / log2(1 +
    place) over the found items, divided by the same sum for a list with min(k, held) of them at the top
    (Järvelin and Kekäläinen 2002, with binary gains).
    """
    gains_K = 1 / torch.arange(2, found_BK.shape[1] + 2, dtype=torch.float64).log2()
    ideal_K = gains_K.cumsum(0)
    out = {}
    for k in cutoffs:
        first_Bk = found_BK[:, :k].double()
        best_B = ideal_K[held_B.clamp(max=first_Bk.shape[1]) - 1]
        out[f"ndcg_at_{k}"] = float(((first_Bk * gains_K[:k]).sum(1) / best_B).mean())
        out[f"recall_at_{k}"] = float((first_Bk.sum(1) / held_B).mean())
    return out


def recommending(info: Mapping[str, Any]) -> Task:
    """Return the task, in which NDCG at the first cutoff decides."""
    cutoffs = info["cutoffs"]

    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        return {
            **recall_and_ndcg(outputs["found_BK"], outputs["held_B"], cutoffs),
            "loss": float(outputs["loss"].double().sum() / outputs["weight"].double().sum()),
        }

    return Task(
        f"ndcg_at_{cutoffs[0]}",
        True,
        compute,
        reads=("found_BK", "popular_BK", "held_B"),
        chosen_by="loss",
        floor=lambda outputs: outputs | {"found_BK": outputs["popular_BK"]},
        floor_name="most popular items",
    )
