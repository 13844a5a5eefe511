"""Two-tower model: a user's and an item's embedding rows become one vector each (their sum, or the output of
a tower), and the dot product of the two is the score.

Trained by a softmax over the items of the batch and drawn ones, each score corrected by how often its item is
drawn (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations"). A
user's item competes with the items of the whole batch. If each device computed a loss of its share, there
would be fewer of them; so only the towers are data-parallel regions, and the home device computes scores and
loss from the vectors of all devices.

Letters: B users, C candidates, F id columns of a tower, D width of a row, E width of a vector (the same), V
items.
"""

import itertools

import torch
from torch import Tensor, nn

from dphybrid.embedding import HostEmbeddingCollection, sampled_softmax
from dphybrid.parallel import DataParallel
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.retrieval import RetrievalModelConfig
from dphybrid.recipes.retrieval.histories import HistoryModel, build_histories
from dphybrid.recipes.retrieval.ranking import rank_held

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
        # A local name: another thread may call `eval` meanwhile.
        found_VE = self._catalog_VE
        if found_VE is None:
            blocks = catalog_VF.split(CATALOG_ROWS)
            found_VE = self._catalog_VE = torch.cat([self.items(block).cpu() for block in blocks])
        return found_VE

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        users_BE = self.users(batch["users_BF"])
        if "candidates_CF" not in batch:
            return rank_held(users_BE, self.catalog(batch["catalog_VF"]), batch, self.depth)
        items_CE = self.items(batch["candidates_CF"])
        # Autocast would compute the scores in 16 bits, see `Side.forward`.
        with torch.autocast(users_BE.device.type, enabled=False):
            scores_BC = users_BE @ items_CE.T
        places_B, log_q_C, counts_C = (
            batch[name].to(users_BE.device) for name in ("places_B", "log_q_C", "counts_C")
        )
        loss_B = sampled_softmax(scores_BC, places_B, log_q_C, counts_C)
        return {"loss": loss_B, "weight": torch.ones_like(loss_B)}


def build_retrieval(context: ModelContext[RetrievalModelConfig]) -> RetrievalModel | HistoryModel:
    o, info = context.options, context.info
    if o.kind not in ("auto", "rows"):  # auto is what models without a kind were trained with: rows
        return build_histories(context)

    def side(name: str) -> Side:
        num_ids = {column: int(count) for column, count in info[f"{name}_ids"].items()}
        # Without towers, small rows make small scores: the model starts from the items' frequencies alone.
        std = 0.1 if o.layers else 0.02
        table = HostEmbeddingCollection(num_ids, o.dim, name=f"{name}s", std=std, make=context.table)
        tower = _Tower(len(num_ids), o.dim, o.hidden, o.layers)
        return Side(table, DataParallel(tower, context.devices))

    return RetrievalModel(side("user"), side("item"), max(info["cutoffs"]))
