"""Two-tower model: a user's and an item's embedding rows become one vector each (their sum, or the output of
a tower), and the dot product of the two is the score.

Trained by a softmax over the items of the batch and drawn ones, each score corrected by how often its item is
drawn (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations"). A
user's item competes with the items of the whole batch. If each device computed a loss of its share, there
would be fewer of them; so only the towers are data-parallel regions, and the home device computes scores and
loss from the vectors of all devices.

Letters: B users, C candidates, F id columns of a tower, D width of a row, E width of a vector (the same), V
items, H held-out items of a user, S items that a user has met, K places of a list.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import HostEmbeddingCollection, sampled_softmax
from dphybrid.embedding.ranking import Best, places_in, score_blocks
from dphybrid.parallel import DataParallel
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.retrieval import RetrievalModelConfig
from dphybrid.training.metrics import Task

CATALOG_ROWS = 2**14
"""Number of items whose vectors are computed at a time."""


class _Tower(nn.Module):
    """rows_BFD -> vectors_BE: hidden layers, or without any the sum of the rows."""

    def __init__(self, num_columns: int, dim: int, hidden: int, layers: int) -> None:
        super().__init__()
        widths = [num_columns * dim] + [hidden] * layers
        steps: list[nn.Module] = []
        for narrow, wide in itertools.pairwise(widths):
            steps += [nn.Linear(narrow, wide), nn.ReLU()]
        self.network = nn.Sequential(*steps, nn.Linear(widths[-1], dim)) if layers else None

    def forward(self, rows_BFD: Tensor) -> Tensor:
        return rows_BFD.sum(1) if self.network is None else self.network(rows_BFD.flatten(1))


class Side(nn.Module):
    """Users or items: a table in host memory for each column, and a tower over their rows, which is a
    data-parallel region."""

    def __init__(self, table: HostEmbeddingCollection, tower: DataParallel) -> None:
        super().__init__()
        self.table, self.tower = table, tower

    def forward(self, ids_BF: Tensor) -> Tensor:
        """Return vectors_BE on the home device, in float32 or wider even under autocast: scores are sums of
        many products."""
        vectors_BE: Tensor = self.tower(self.tower.rows(self.table, ids_BF))
        return vectors_BE.to(torch.promote_types(vectors_BE.dtype, torch.float32))


def _popular_found(held_BH: Tensor, seen_BS: Tensor, num_items: int, k: int) -> Tensor:
    """Return found_BK for the list of the k most popular items (those with the smallest numbers) that a user
    has not met. Both inputs are sorted and padded with `num_items`."""
    # An item's place in that list is its number, less the smaller numbers that the user has met.
    place_BH = held_BH - torch.searchsorted(seen_BS, held_BH)
    place_BH = place_BH.where((held_BH < num_items) & (place_BH < k), k)
    # Column k takes the items beyond the list, and is cut off.
    found_BK = torch.zeros(len(held_BH), k + 1, dtype=torch.bool, device=held_BH.device)
    return found_BK.scatter(1, place_BH, True)[:, :k]


class RetrievalModel(nn.Module):
    """Trains users' vectors to have high scores with their items' vectors. In evaluation ranks all items for
    each user. depth: length of the longest list that is evaluated."""

    def __init__(self, users: Side, items: Side, depth: int) -> None:
        super().__init__()
        self.users, self.items, self.depth = users, items, depth
        self._catalog_VE: Tensor | None = None

    def train(self, mode: bool = True) -> "RetrievalModel":
        # Weights may change before the next evaluation. `eval()` calls this, too.
        self._catalog_VE = None
        return super().train(mode)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up in training, so that their rows can be prefetched."""
        return {
            "users.table": self.users.table.flat_ids(batch["users_BF"]),
            "items.table": self.items.table.flat_ids(batch["candidates_CF"]),
        }

    def catalog(self, catalog_VF: Tensor) -> Tensor:
        """Return catalog_VE, the vectors of all items on the CPU. They are kept until `train` or `eval` is
        called."""
        if self._catalog_VE is None:
            blocks = catalog_VF.split(CATALOG_ROWS)
            self._catalog_VE = torch.cat([self.items(block).cpu() for block in blocks])
        return self._catalog_VE

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        users_BE = self.users(batch["users_BF"])
        if "candidates_CF" not in batch:
            return self._rank(users_BE, batch)
        items_CE = self.items(batch["candidates_CF"])
        # Autocast would compute the scores in 16 bits, see `Side.forward`.
        with torch.autocast(users_BE.device.type, enabled=False):
            scores_BC = users_BE @ items_CE.T
        places_B, items_C, log_q_C = (
            tensor.to(users_BE.device)
            for tensor in (batch["places_B"], batch["candidates_CF"][:, 0], batch["log_q_C"])
        )
        loss_B = sampled_softmax(scores_BC, places_B, items_C, log_q_C)
        return {"loss": loss_B, "weight": torch.ones_like(loss_B)}

    @torch.no_grad()
    def _rank(self, users_BE: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look for the held-out items among the `depth` best ones of those that the user has not met. The
        loss is that of a softmax over all of those, summed over the held-out items."""
        items_VE = self.catalog(batch["catalog_VF"])
        held_BH, seen_BS = batch["held_BH"].to(users_BE.device), batch["seen_BS"].to(users_BE.device)
        best, held_scores_BH = Best(users_BE, self.depth), users_BE.new_zeros(held_BH.shape)
        total_B = users_BE.new_full((len(users_BE),), -torch.inf)
        for start, scores_BV in score_blocks(users_BE, items_VE, seen_BS):
            best.add(start, scores_BV)
            total_B = torch.logaddexp(total_B, scores_BV.logsumexp(1))
            place_BH = places_in(held_BH, start, scores_BV.shape[1])
            # For a held-out item of another block the place is that of the padded column, which adds 0.
            held_scores_BH += F.pad(scores_BV, (0, 1)).gather(1, place_BH)
        is_held_BH = held_BH < len(items_VE)  # the others are padding
        loss_BH = (total_B.unsqueeze(1) - held_scores_BH) * is_held_BH
        place_BK = torch.searchsorted(held_BH, best.rows_QK).clamp(max=held_BH.shape[1] - 1)
        return {
            "loss": loss_BH.sum(1),
            "weight": is_held_BH.sum(1).to(loss_BH),
            "found_BK": held_BH.gather(1, place_BK) == best.rows_QK,
            "popular_BK": _popular_found(held_BH, seen_BS, len(items_VE), self.depth),
            "held_B": is_held_BH.sum(1),
        }


def build_retrieval(context: ModelContext[RetrievalModelConfig]) -> RetrievalModel:
    o, info = context.options, context.info

    def side(name: str) -> Side:
        num_ids = {column: int(count) for column, count in info[f"{name}_ids"].items()}
        # Without towers, small rows make small scores: the model starts from the items' frequencies alone.
        std = 0.1 if o.layers else 0.02
        table = HostEmbeddingCollection(num_ids, o.dim, name=f"{name}s", std=std, make=context.table)
        tower = _Tower(len(num_ids), o.dim, o.hidden, o.layers)
        return Side(table, DataParallel(tower, context.devices))

    return RetrievalModel(side("user"), side("item"), max(info["cutoffs"]))


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
        out[f"recall_at_{k}"] = float((first_Bk.sum(1) / held_B).mean())
        best_B = ideal_K[held_B.clamp(max=first_Bk.shape[1]) - 1]
        out[f"ndcg_at_{k}"] = float(((first_Bk * gains_K[:k]).sum(1) / best_B).mean())
    return out


def recommending(info: Mapping[str, Any]) -> Task:
    """Return the task, in which NDCG at the first cutoff decides."""
    cutoffs = info["cutoffs"]

    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        return {
            **recall_and_ndcg(outputs["found_BK"], outputs["held_B"], cutoffs),
            "loss": float(outputs["loss"].double().sum() / outputs["weight"].double().sum()),
        }

    def baselines(outputs: dict[str, Tensor]) -> dict[str, dict[str, float]]:
        return {"most popular items": recall_and_ndcg(outputs["popular_BK"], outputs["held_B"], cutoffs)}

    reads = ("found_BK", "popular_BK", "held_B")
    return Task(f"ndcg_at_{cutoffs[0]}", True, compute, reads, baselines=baselines)
