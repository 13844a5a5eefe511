"""The model: a row of a table for each user and item, in host memory, and layers over them on the devices;
and the metrics over the validation split.

Letters: B samples.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from dphybrid.parallel import DataParallel
from dphybrid.recipes import ModelConfig, ModelContext, Task


class Options(ModelConfig):
    """Each field is a flag, `--model.dim`."""

    dim: int = Field(default=8, ge=1, le=4096)
    """Width of an embedding row."""


class Network(nn.Module):
    """From batches to losses."""

    def __init__(self, context: ModelContext[Options]) -> None:
        super().__init__()
        dim = context.options.dim
        self.users = context.table(context.num_ids("user"), dim, name="users")
        self.items = context.table(context.num_ids("item"), dim, name="items")
        # What is in here runs on the devices, each with its share of the batch.
        self.region = DataParallel(nn.Bilinear(dim, dim, 1), context.devices)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The ids that `forward` looks up, so that GPUs get the next batch's rows ahead."""
        return {"users": batch["user_B"], "items": batch["item_B"]}

    def ratings(self, users_B: Tensor, items_B: Tensor) -> Tensor:
        """Return the predicted ratings (B,)."""
        # Each device gets the rows of its own samples.
        rows = self.region.rows(self.users, users_B), self.region.rows(self.items, items_B)
        rating_B: Tensor = self.region(*rows).squeeze(1)
        return rating_B

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss of each sample, its number of terms, and what the metrics read."""
        rating_B = self.ratings(batch["user_B"], batch["item_B"])
        # A loss a sample: a mean of devices' means would be wrong where shares differ in size.
        loss_B = (rating_B - batch["rating_B"].to(rating_B)).square()
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "predicted": rating_B}


def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
    """Return the metrics by name."""
    error_B = (outputs["predicted"] - outputs["rating_B"]).double()
    return {"mae": float(error_B.abs().mean()), "rmse": float(error_B.square().mean().sqrt())}


TASK = Task(
    "mae", higher_is_better=False, compute=compute, reads=("predicted", "rating_B"), prediction="predicted"
)
"""The metric that decides, and what its computing reads of batches and outputs."""
