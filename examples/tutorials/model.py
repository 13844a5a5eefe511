"""The small models: toy, blocks, hybrid, convnet and digits. Each is a plain module; `Supervised` adds the
loss of a task.

Letters: B samples, I inputs, O outputs, C classes or channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.config import ModelConfig
from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import DataParallel, Devices
from dphybrid.recipes.context import ModelContext

from . import (
    BlocksModelConfig,
    ConvnetModelConfig,
    DigitsModelConfig,
    HybridModelConfig,
)

_CLASSES = 10


class Supervised(nn.Module):
    """Adds a loss to a module `network(input) -> output`: the network gets the batch's input, and the loss
    compares its output with the batch's target."""

    def __init__(
        self,
        network: nn.Module,
        keys: tuple[str, str, str],
        loss: Callable[[Tensor, Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """keys: names of the input and the target in the batch, and of the output in the result."""
        super().__init__()
        self.network = network
        self.input_key, self.target_key, self.output_key = keys
        self.loss, self.dtype = loss, dtype

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        input_B = batch[self.input_key]
        # Ids are whole numbers and must stay so.
        if input_B.is_floating_point():
            input_B = input_B.to(self.dtype)
        output_BO = self.network(input_B)
        # The loss is computed outside the region, on the device that gathers the outputs.
        target_B = batch[self.target_key].to(output_BO.device, non_blocking=True)
        loss_B = self.loss(output_BO, target_B)
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), self.output_key: output_BO}


def _squared_error(output_BO: Tensor, target_BO: Tensor) -> Tensor:
    """Return the mean squared error of each sample (B,)."""
    return (output_BO - target_BO.to(output_BO.dtype)).square().mean(1)


# Keys of `Supervised`.
_REGRESSION = ("x_BI", "y_BO", "prediction")
_IMAGES = ("x_BCHW", "labels_B", "logits")
_cross_entropy = partial(F.cross_entropy, reduction="none")


class Blocks(nn.Module):
    """Three linear layers of which only the middle one is data-parallel; the outer two run on the first
    device."""

    def __init__(self, inputs: int, width: int, outputs: int, devices: Devices) -> None:
        super().__init__()
        self.block1 = nn.Linear(inputs, width).to(devices.home)
        self.block2 = DataParallel(nn.Linear(width, width), devices)
        self.block3 = nn.Linear(width, outputs).to(devices.home)
        self.home = devices.home

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.block3(self.block2(self.block1(x_BI.to(self.home))))


class Hybrid(nn.Module):
    """A table in host memory, a linear layer on the devices."""

    def __init__(self, table: HostEmbedding, region: DataParallel) -> None:
        super().__init__()
        self.table = table
        self.region = region

    def forward(self, ids_B: Tensor) -> Tensor:
        return self.region(self.region.rows(self.table, ids_B))


class _SupervisedHybrid(Supervised):
    """A `Hybrid` with its loss and `table_ids`, so that its rows can be prefetched."""

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up, so that their rows can be prefetched."""
        return {"network.table": batch[self.input_key]}


def _width(context: ModelContext[Any], name: str) -> int:
    return int(context.info["shapes"][name][0])


def build_toy(context: ModelContext[ModelConfig]) -> Supervised:
    """Build Linear(5, 2), all of it data-parallel."""
    layer = nn.Linear(_width(context, "x_BI"), _width(context, "y_BO"))
    return Supervised(DataParallel(layer, context.devices), _REGRESSION, _squared_error, context.dtype)


def build_blocks(context: ModelContext[BlocksModelConfig]) -> Supervised:
    """Build Linear(10, 20) -> DataParallel(Linear(20, 20)) -> Linear(20, 20)."""
    inputs, outputs = _width(context, "x_BI"), _width(context, "y_BO")
    network = Blocks(inputs, context.options.hidden, outputs, context.devices)
    return Supervised(network, _REGRESSION, _squared_error, context.dtype)


def build_hybrid(context: ModelContext[HybridModelConfig]) -> Supervised:
    """Build Embedding(1000, 10) on the CPU -> Linear(10, 10) on the devices."""
    dim = context.options.dim
    table = context.table(context.num_ids("ids_B"), dim, name="table")
    network = Hybrid(table, DataParallel(nn.Linear(dim, _width(context, "y_BO")), context.devices))
    return _SupervisedHybrid(network, ("ids_B", "y_BO", "prediction"), _squared_error, context.dtype)


def build_convnet(context: ModelContext[ConvnetModelConfig]) -> Supervised:
    """Build Conv2d(3, 64, 3, padding=1) -> ReLU -> Linear(64 * 32 * 32, 10), with cross-entropy."""
    hidden = context.options.hidden
    convolution, last = nn.Conv2d(3, hidden, 3, padding=1), nn.Linear(hidden * 32 * 32, _CLASSES)
    network = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), last)
    return Supervised(DataParallel(network, context.devices), _IMAGES, _cross_entropy, context.dtype)


def build_digits(context: ModelContext[DigitsModelConfig]) -> Supervised:
    """Build two convolutions, max pooling and two linear layers, with cross-entropy."""
    o, (channels, height, width) = context.options, context.info["shapes"]["x_BCHW"]
    network = nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(o.dropout),
        nn.Linear(64 * (height // 2) * (width // 2), o.hidden), nn.ReLU(), nn.Dropout(o.dropout),
        nn.Linear(o.hidden, _CLASSES),
    )  # fmt: skip
    return Supervised(DataParallel(network, context.devices), _IMAGES, _cross_entropy, context.dtype)
