"""The small models: toy, blocks, hybrid, convnet and digits. Each is a plain module; `Supervised` adds the
loss of its task.

Letters: B samples, I inputs, O outputs, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import DataParallel, Devices
from dphybrid.recipes.context import ModelContext

_CLASSES = 10


class Supervised(nn.Module):
    """Adds a loss to a module `network(input) -> output`: the network gets the batch's input, and its output
    is compared with the batch's labels_B (cross-entropy), or with y_BO (the mean squared error of a
    sample)."""

    def __init__(self, network: nn.Module, input_key: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.input_key, self.dtype = network, input_key, dtype

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        input_B = batch[self.input_key]
        # Ids are whole numbers and must stay so.
        output_BO = self.network(input_B.to(self.dtype) if input_B.is_floating_point() else input_B)
        # The loss is computed outside the region, on the device that gathers the outputs.
        if "labels_B" in batch:
            labels_B = batch["labels_B"].to(output_BO.device, non_blocking=True)
            key, loss_B = "logits", cross_entropy(output_BO, labels_B, reduction="none")
        else:
            key, y_BO = "prediction", batch["y_BO"].to(output_BO, non_blocking=True)
            loss_B = (output_BO - y_BO).square().mean(1)
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), key: output_BO}


class Blocks(nn.Module):
    """Three linear layers of which only the middle one is data-parallel; the outer two run on the first
    device."""

    def __init__(self, inputs: int, outputs: int, devices: Devices) -> None:
        super().__init__()
        self.block1 = nn.Linear(inputs, 20).to(devices.home)
        self.block2 = DataParallel(nn.Linear(20, 20), devices)
        self.block3 = nn.Linear(20, outputs).to(devices.home)
        self.home = devices.home

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.block3(self.block2(self.block1(x_BI.to(self.home))))


class Hybrid(nn.Module):
    """A table in host memory, a linear layer on the devices."""

    def __init__(self, table: HostEmbedding, region: DataParallel) -> None:
        super().__init__()
        self.table, self.region = table, region

    def forward(self, ids_B: Tensor) -> Tensor:
        return self.region(self.region.rows(self.table, ids_B))


class _SupervisedHybrid(Supervised):
    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up, so that their rows can be prefetched."""
        return {"network.table": batch["ids_B"]}


def _width(context: ModelContext[Any], name: str) -> int:
    return int(context.info["shapes"][name][0])


def build_toy(context: ModelContext[Any]) -> Supervised:
    """Build Linear(5, 2), all of it data-parallel."""
    layer = nn.Linear(_width(context, "x_BI"), _width(context, "y_BO"))
    return Supervised(DataParallel(layer, context.devices), "x_BI", context.dtype)


def build_blocks(context: ModelContext[Any]) -> Supervised:
    """Build Linear(10, 20) -> DataParallel(Linear(20, 20)) -> Linear(20, 20)."""
    inputs, outputs = _width(context, "x_BI"), _width(context, "y_BO")
    return Supervised(Blocks(inputs, outputs, context.devices), "x_BI", context.dtype)


def build_hybrid(context: ModelContext[Any]) -> Supervised:
    """Build Embedding(1000, 10) on the CPU -> Linear(10, 10) on the devices."""
    dim = context.options.dim
    table = context.table(context.num_ids("ids_B"), dim, name="table")
    network = Hybrid(table, DataParallel(nn.Linear(dim, _width(context, "y_BO")), context.devices))
    return _SupervisedHybrid(network, "ids_B", context.dtype)


def build_convnet(context: ModelContext[Any]) -> Supervised:
    """Build Conv2d(3, 64, 3, padding=1) -> ReLU -> Linear(64 * 32 * 32, 10), with cross-entropy."""
    convolution, last = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64 * 32 * 32, _CLASSES)
    network = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), last)
    return Supervised(DataParallel(network, context.devices), "x_BCHW", context.dtype)


def build_digits(context: ModelContext[Any]) -> Supervised:
    """Build two convolutions, max pooling and two linear layers, with cross-entropy."""
    o, (channels, height, width) = context.options, context.info["shapes"]["x_BCHW"]
    network = nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(o.dropout),
        nn.Linear(64 * (height // 2) * (width // 2), o.hidden), nn.ReLU(), nn.Dropout(o.dropout),
        nn.Linear(o.hidden, _CLASSES),
    )  # fmt: skip
    return Supervised(DataParallel(network, context.devices), "x_BCHW", context.dtype)
