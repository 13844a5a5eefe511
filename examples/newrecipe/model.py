"""The model and its metrics. Users and items have one row each in tables in host memory; a layer on the
devices turns two rows into a rating.

The last letters of a tensor's name are its dimensions. B: samples of a batch.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from dphybrid.parallel import DataParallel
from dphybrid.recipes import ModelConfig, ModelContext, Task, mean_of


class Options(ModelConfig):
    """Fields of the model. Each is a flag, such as `--model.dim`."""

    dim: int = Field(default=8, ge=1, le=4096)
    """Width of an embedding row."""


class Network(nn.Module):
    """Maps a batch to the loss of each sample."""

    def __init__(self, context: ModelContext[Options]) -> None:
        super().__init__()
        dim = context.options.dim
        self.users = context.table(context.num_ids("user"), dim, name="users")
        self.items = context.table(context.num_ids("item"), dim, name="items")
        # The tables stay in host memory. The module in DataParallel runs on every device, each with its share
        # of the batch; put all dense layers in here.
        self.region = DataParallel(nn.Bilinear(dim, dim, 1), context.devices)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up, by the table's attribute: dphybrid fetches the next batch's
        rows while the devices compute."""
        return {"users": batch["user_B"], "items": batch["item_B"]}

    def ratings(self, users_B: Tensor, items_B: Tensor) -> Tensor:
        """Return the predicted ratings (B,)."""
        # region.rows sends each device only the rows of its own samples.
        rows = self.region.rows(self.users, users_B), self.region.rows(self.items, items_B)
        rating_B: Tensor = self.region(*rows).squeeze(1)
        return rating_B

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss of each sample, its weight in the mean, and the outputs that the metrics read."""
        rating_B = self.ratings(batch["user_B"], batch["item_B"])
        # One loss per sample, not the mean: devices may have shares of different sizes, and the mean of their
        # means would be wrong.
        loss_B = (rating_B - batch["rating_B"].to(rating_B)).square()
        # The mean loss is sum(loss) / sum(weight); samples with several labels would have larger weights.
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "predicted": rating_B}


def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
    """Return the metrics by name. outputs: those named in `TASK.reads`, of all validation samples."""
    # float64: a float32 sum over many samples would lose digits.
    error_B = (outputs["predicted"] - outputs["rating_B"]).double()
    return {"mae": float(error_B.abs().mean()), "rmse": float(error_B.square().mean().sqrt())}


TASK = Task(
    "mae",
    higher_is_better=False,
    compute=compute,
    reads=("predicted", "rating_B"),
    floor=mean_of("predicted"),
)
"""The metric that decides which checkpoint is the best, and the outputs and batch entries that `compute`
reads. floor: a constant prediction, with which the model is compared."""
