"""Your own model for a built-in recipe: a function, here a class, from a ModelContext to a module.

    dphybrid train --recipe ctr --data.path clicks.csv --data.label clicked --model.factory
    examples.own_model:Factors

Letters: B samples, F ids of a sample, N numbers of a sample, D width of a row.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dphybrid.config import ModelConfig
from dphybrid.parallel import DataParallel
from dphybrid.recipes import ModelContext


class Head(nn.Module):
    """The part on the devices: products of rows, and a linear function of the numbers."""

    def __init__(self, num_dense: int, dim: int) -> None:
        super().__init__()
        self.products = nn.Linear(dim, 1)
        self.numbers = nn.Linear(max(1, num_dense), 1)

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        # The sum over all pairs of rows, times two: square of the sum - sum of the squares.
        pairs_BD = rows_BFD.sum(1).square() - rows_BFD.square().sum(1)
        return (self.products(pairs_BD) + self.numbers(dense_BN)).squeeze(1)


class Factors(nn.Module):
    """A factorization machine over the rows of all columns."""

    def __init__(self, context: ModelContext[ModelConfig], dim: int = 8) -> None:
        super().__init__()
        sizes = torch.tensor([0, *context.info["num_ids"]])
        # One table holds the rows of all columns, one column after the other.
        self.offsets_F = sizes.cumsum(0)[:-1]
        # context.table applies --table.* and the settings (number format, memory or files).
        self.table = context.table(int(sizes.sum()), dim, name="table")
        self.region = DataParallel(Head(context.info["num_dense"], dim), context.devices)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up, so that their rows can be prefetched during the step
        before."""
        return {"table": batch["ids_BF"] + self.offsets_F}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        # Sends each replica only the rows of its own samples.
        rows_BFD = self.region.rows(self.table, self.table_ids(batch)["table"])
        # Without numeric columns: one column of zeros, which nn.Linear accepts.
        dense_BN = (
            batch["dense_BN"]
            if batch["dense_BN"].shape[1]
            else batch["dense_BN"].new_zeros(len(batch["ids_BF"]), 1)
        )
        logits_B = self.region(rows_BFD, dense_BN)
        # One loss per sample, as recipes want it; dphybrid divides the sum of loss by the sum of weight.
        labels_B = batch["labels_B"].to(logits_B)
        loss_B = binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "logits": logits_B}
