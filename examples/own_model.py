"""A model of your own for a built-in recipe: a function that takes a ModelContext and returns a module.

    dphybrid train --recipe ctr --data.path clicks.csv --data.label clicked --model.factory
    examples.own_model:Factors

The class is the function here. Letters: B samples, F ids a sample, N numbers a sample, D width of a row.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dphybrid.config import ModelConfig
from dphybrid.parallel import DataParallel
from dphybrid.recipes import ModelContext


class Head(nn.Module):
    """What runs on the devices: products of rows, and a line through the numbers."""

    def __init__(self, num_dense: int, dim: int) -> None:
        super().__init__()
        self.products = nn.Linear(dim, 1)
        self.numbers = nn.Linear(max(1, num_dense), 1)

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        # all pairs of rows, as in factorisation machines
        pairs_BD = rows_BFD.sum(1).square() - rows_BFD.square().sum(1)
        return (self.products(pairs_BD) + self.numbers(dense_BN)).squeeze(1)


class Factors(nn.Module):
    """A factorisation machine over the columns' rows."""

    def __init__(self, context: ModelContext[ModelConfig], dim: int = 8) -> None:
        super().__init__()
        sizes = torch.tensor([0, *context.info["num_ids"]])
        self.offsets_F = sizes.cumsum(0)[:-1]  # the columns' ids lie one after the other in one table
        # as --table.* and the settings want it
        self.table = context.table(int(sizes.sum()), dim, name="table")
        self.region = DataParallel(Head(context.info["num_dense"], dim), context.devices)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Say which rows `forward` will look up, so that they can be fetched while the step before
        computes."""
        return {"table": batch["ids_BF"] + self.offsets_F}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        # each replica's rows go straight to it
        rows_BFD = self.region.rows(self.table, self.table_ids(batch)["table"])
        dense_BN = (
            batch["dense_BN"]
            if batch["dense_BN"].shape[1]
            else batch["dense_BN"].new_zeros(len(batch["ids_BF"]), 1)
        )
        logits_B = self.region(rows_BFD, dense_BN)
        labels_B = batch["labels_B"].to(logits_B)
        loss_B = binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "logits": logits_B}
