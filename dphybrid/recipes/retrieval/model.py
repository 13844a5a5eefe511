"""A user's and an item's rows become one vector each, their sum or what a tower makes of them, and the dot
product of the two is the score.

Trained by a softmax over the items of the batch and drawn ones, each score corrected by how often its item is
drawn (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations"). Every
user competes against the items of the whole batch, which a split batch would change: so the towers are the
data-parallel regions, and scores and loss are computed on the home device from their joined vectors.

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
"""Items whose vectors are computed at a time."""


class _Tower(nn.Module):
    """rows_BFD -> vectors_BE; without hidden layers the sum of the rows."""

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
    """Users or items: a table a column in host memory, and a tower, the data-parallel region, over their
    rows."""

    def __init__(self, table: HostEmbeddingCollection, tower: DataParallel) -> None:
        super().__init__()
        self.table, self.tower = table, tower

    def forward(self, ids_BF: Tensor) -> Tensor:
        """Return vectors_BE on the home device, in float32 at least: scores are sums of many products, also
        where autocast made the blocks' numbers short."""
        vectors_BE: Tensor = self.tower(self.tower.rows(self.table, ids_BF))
        return vectors_BE.to(torch.promote_types(vectors_BE.dtype, torch.float32))


def _popular_found(held_BH: Tensor, seen_BS: Tensor, num_items: int, k: int) -> Tensor:
    """Return found_BK of the list of the most popular items (those of the smallest numbers) that a user has
    not met. Both inputs are sorted, with `num_items` at their end."""
    place_BH = held_BH - torch.searchsorted(seen_BS, held_BH)
    place_BH = place_BH.where((held_BH < num_items) & (place_BH < k), k)
    found_BK = torch.zeros(len(held_BH), k + 1, dtype=torch.bool, device=held_BH.device)
    return found_BK.scatter(1, place_BH, True)[:, :k]


class RetrievalModel(nn.Module):
    """Trains users' vectors to find their items' ones; in evaluation ranks all items for each user. depth:
    places that evaluation looks at."""

    def __init__(self, users: Side, items: Side, depth: int) -> None:
        super().__init__()
        self.users, self.items, self.depth = users, items, depth
        self._catalog_VE: Tensor | None = None

    def train(self, mode: bool = True) -> "RetrievalModel":
        self._catalog_VE = None  # its weights may change before the next evaluation
        return super().train(mode)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The ids that `forward` will look up in training, so that their rows can be fetched ahead."""
        return {
            "users.table": self.users.table.flat_ids(batch["users_BF"]),
            "items.table": self.items.table.flat_ids(batch["candidates_CF"]),
        }

    def catalog(self, catalog_VF: Tensor) -> Tensor:
        """Return the vectors of all items on the CPU, computed once until `train` or `eval` is called."""
        if self._catalog_VE is None:
            blocks = catalog_VF.split(CATALOG_ROWS)
            self._catalog_VE = torch.cat([self.items(block).cpu() for block in blocks])
        return self._catalog_VE

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        users_BE = self.users(batch["users_BF"])
        if "candidates_CF" not in batch:
            return self._rank(users_BE, batch)
        items_CE = self.items(batch["candidates_CF"])
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
        """Look for the held-out items in the best `depth` ones that the user has not met; the loss is of a
        softmax over all of these, summed over the held-out ones."""
        items_VE = self.catalog(batch["catalog_VF"])
        held_BH, seen_BS = batch["held_BH"].to(users_BE.device), batch["seen_BS"].to(users_BE.device)
        best, held_scores_BH = Best(users_BE, self.depth), users_BE.new_zeros(held_BH.shape)
        total_B = users_BE.new_full((len(users_BE),), -torch.inf)
        for start, scores_BV in score_blocks(users_BE, items_VE, seen_BS):
            best.add(start, scores_BV)
            total_B = torch.logaddexp(total_B, scores_BV.logsumexp(1))
            place_BH = places_in(held_BH, start, scores_BV.shape[1])
            # What another block holds has its place in the padded column, and adds 0.
            held_scores_BH += F.pad(scores_BV, (0, 1)).gather(1, place_BH)
        is_held_BH = held_BH < len(items_VE)
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
        std = 0.1 if o.layers else 0.02  # small vectors start from the items' frequencies alone
        table = HostEmbeddingCollection(num_ids, o.dim, name=f"{name}s", std=std, make=context.table)
        tower = _Tower(len(num_ids), o.dim, o.hidden, o.layers)
        return Side(table, DataParallel(tower, context.devices))

    return RetrievalModel(side("user"), side("item"), max(info["cutoffs"]))


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


def recommending(info: Mapping[str, Any]) -> Task:
    """Return the task: the first cutoff's NDCG decides."""
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
