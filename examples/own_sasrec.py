"""A recipe with a vocabulary, negatives and metrics over all items: SASRec (Kang and McAuley 2018), which
predicts the item that a user takes next.

    dphybrid train --recipe examples.own_sasrec:SasRec --devices 'cpu*2'

Letters: B sequences, L positions (the oldest first, padded with 0 in front), K negatives, D width of a row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus

from dphybrid.data import Dataset, DrawnDataset, Draws, Vocabulary
from dphybrid.embedding import rank_rows
from dphybrid.parallel import DataParallel
from dphybrid.recipes import DataConfig, ModelConfig, ModelContext, Recipe, Task
from dphybrid.util.errors import UserError

LENGTH, BEST = 8, 10
Batch = dict[str, Tensor]


class SasRecData(DataConfig):
    path: str | None = None
    """CSV file with the columns user and item, a user's items in order. Empty: made-up walks."""


class SasRecModel(ModelConfig):
    dim: int = Field(default=16, ge=2)
    """Width of an item's row; two heads share it."""
    negatives: int = Field(default=4, ge=1)
    """Random items for each sequence, with which the taken items compete."""


def walks(seed: int) -> pl.DataFrame:
    """Return made-up users who mostly go from an item to one of the next two."""
    random = np.random.default_rng(seed)
    steps = random.choice([1, 2, 17], (400, 12), p=[0.6, 0.3, 0.1])
    items = (random.integers(0, 60, (400, 1)) + steps.cumsum(1)) % 60
    user = np.repeat(np.arange(400), 12)
    return pl.DataFrame({"user": user, "item": [f"item {n}" for n in items.ravel()]})


def padded(lists: list[list[str]], items: Vocabulary) -> np.ndarray:
    """Return the ids (B, L) of the last items of each list."""
    return items.ids([[None] * (LENGTH - len(each)) + each[-LENGTH:] for each in lists])


class Layers(nn.Module):
    """rows_BLD -> expected_BLD, the vector expected at the next position."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.places_LD = nn.Parameter(torch.randn(LENGTH, dim) * 0.1)
        self.layer = nn.TransformerEncoderLayer(dim, 2, 2 * dim, batch_first=True, norm_first=True)
        # The causal mask: a position must not see later ones.
        self.register_buffer("later_LL", torch.full((LENGTH, LENGTH), -torch.inf).triu(1), persistent=False)

    def forward(self, rows_BLD: Tensor) -> Tensor:
        expected_BLD: Tensor = self.layer(rows_BLD + self.places_LD, src_mask=self.later_LL)
        return expected_BLD


class Net(nn.Module):
    def __init__(self, context: ModelContext[SasRecModel]) -> None:
        super().__init__()
        self.items = context.table(context.num_ids("item"), context.options.dim, name="items")
        self.region = DataParallel(Layers(context.options.dim), context.devices)

    def expected(self, past_BL: Tensor) -> Tensor:
        """Return expected_BLD, the vector of the item expected after each position."""
        expected_BLD: Tensor = self.region(self.items(past_BL))
        return expected_BLD

    # [start:forward]
    def forward(self, batch: Batch) -> Batch:
        past_BL, next_BL = batch["past_BL"], batch["next_BL"]
        expected_BLD = self.expected(past_BL)
        # Evaluation has no negatives: it ranks the next item among all items outside the sequence.
        if "negatives_BK" not in batch:
            ranked = rank_rows(expected_BLD[:, -1], self.items, next_BL[:, -1], hidden_QS=past_BL)
            return {"loss": ranked.loss_Q, "weight": torch.ones_like(ranked.loss_Q), "rank_B": ranked.ranks_Q}
        taken_BL = (expected_BLD * self.items(next_BL)).sum(2)
        drawn_BLK = expected_BLD @ self.items(batch["negatives_BK"]).transpose(1, 2)
        is_item_BL = (next_BL > 0).to(taken_BL)  # padding has no loss
        loss_BL = (softplus(-taken_BL) + softplus(drawn_BLK).mean(2)) * is_item_BL
        return {"loss": loss_BL.sum(1), "weight": is_item_BL.sum(1)}

    # [end:forward]


def over_all_items(outputs: Batch) -> dict[str, float]:
    ranks_B = outputs["rank_B"].double()
    gains_B = 1 / (1 + ranks_B).log2() * (ranks_B <= BEST)
    return {"ndcg_at_10": float(gains_B.mean()), "recall_at_10": float((ranks_B <= BEST).double().mean())}


class SasRec(Recipe):
    name = "sasrec"
    summary = "Sequences of items: which one comes next."
    data = SasRecData
    model = SasRecModel
    train = {"epochs": 6, "batch_size": 32, "lr": 0.005}
    table = {"optimizer": "adam", "lr": 0.01}
    example = {"items": ["item 3|item 4|item 6", "item 59"]}

    def rows(self, data: SasRecData, seed: int) -> tuple[Any, Any, dict[str, Vocabulary]]:
        if data.path and not Path(data.path).is_file():
            raise UserError(f"data.path={data.path}: there is no such file; give a CSV of users and items")
        frame = pl.read_csv(data.path, infer_schema=False) if data.path else walks(seed)
        lists = frame.group_by("user", maintain_order=True).agg("item")["item"].to_list()
        # Without the last items, which training does not see.
        items = Vocabulary.fit([item for taken in lists for item in taken[:-1]])

        def split(end: int) -> dict[str, np.ndarray]:
            past, following = ([taken[k : len(taken) - end + k] for taken in lists] for k in (0, 1))
            return {"past_BL": padded(past, items), "next_BL": padded(following, items)}

        # Validation predicts each user's last item; training ends one item before.
        return split(2), split(1), {"item": items}

    # [start:draw]
    def training_rows(self, rows: Dataset, info: Mapping[str, Any], model: SasRecModel) -> Dataset:
        # `draws` depends on seed, epoch and sample, so that a resumed run draws the same negatives.
        def draw(_: Batch, draws: Draws) -> Batch:
            return {"negatives_BK": draws.integers(1, info["num_ids"]["item"], model.negatives)}

        return DrawnDataset(rows, draw)

    # [end:draw]

    def build(self, context: ModelContext[SasRecModel]) -> nn.Module:
        return Net(context)

    def task(self, info: Mapping[str, Any]) -> Task:
        return Task("ndcg_at_10", True, over_all_items, reads=("rank_B",))

    def predict(self, model: Any, rows: pl.DataFrame, vocabularies: Mapping[str, Vocabulary]) -> pl.DataFrame:
        """Return the best next item for each row's items, which are separated by |."""
        items = vocabularies["item"]
        past_BL = torch.from_numpy(padded(rows["items"].str.split("|").to_list(), items))
        best = rank_rows(model.expected(past_BL)[:, -1], model.items, hidden_QS=past_BL, k=1)
        found = [items.value(row) for row in best.rows_QK[:, 0].tolist()]
        return rows.with_columns(next=pl.Series(found, dtype=pl.String), score=best.scores_QK[:, 0].numpy())
