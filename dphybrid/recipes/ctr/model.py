"""Click-through models: one host table for all id columns, and one region with the network over rows and
numbers, and the loss.

- mlp: hidden layers over rows and numbers side by side;
- dlrm: DLRM (Naumov et al. 2019): dot products of all pairs of rows and of a network's view of the numbers
  feed a second network;
- dcn: DCN-v2 (Wang et al. 2021, "DCN V2: Improved Deep & Cross Network", the parallel structure): layers that
  multiply the input with a linear map of itself, beside hidden layers.

A bag enters the network as the mean of its items' rows.

Letters: B samples, F id columns, N numeric columns, G columns of bags, L items of a bag, D width of a row, V
fields (rows and numbers), P pairs, C outputs. logits are logits_B with one output, logits_BC with more.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.data.batches import Draw, Draws
from dphybrid.data.table.values import UNKNOWN_ID
from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import DataParallel
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.ctr import CtrModelConfig
from dphybrid.recipes.ctr.numbers import EmbeddedBins, OnNumbers, bins_of
from dphybrid.recipes.ctr.pairs import Pairs
from dphybrid.training.label_tasks import cross_entropy_of_two, label_task


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network: its inputs (num_columns rows of width dim, and num_dense numbers), its hidden
    layers, its outputs per sample, and dcn's cross layers."""

    num_columns: int
    dim: int
    num_dense: int
    hidden: int
    layers: int
    dropout: float
    outputs: int = 1
    cross_layers: int = 2

    def network(self, inputs: int) -> nn.Sequential:
        """Return linear layers with ReLU and dropout between them. The first takes its inputs side by
        side."""
        widths = [inputs] + [self.hidden] * self.layers
        steps: list[nn.Module] = []
        for narrow, wide in itertools.pairwise(widths):
            linear = nn.Linear if steps else SideBySide
            steps += [linear(narrow, wide), nn.ReLU(), nn.Dropout(self.dropout)]
        return Network(*steps, nn.Linear(widths[-1], self.outputs))


class SideBySide(nn.Linear):
    """nn.Linear of torch.cat(inputs, dim=1), without the copies that cat and its gradient make."""

    def forward(self, *inputs: Tensor) -> Tensor:
        if len(inputs) == 1:
            return super().forward(*inputs)
        weights = self.weight.split([values.shape[1] for values in inputs], dim=1)
        out: Tensor = self.bias
        for values, part in zip(inputs, weights, strict=True):
            out = torch.addmm(out, values, part.T)
        return out


class Network(nn.Sequential):
    """nn.Sequential whose first module may take several inputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        first, *others = self
        found: Tensor = first(*inputs)
        for module in others:
            found = module(found)
        return found


class _Mlp(nn.Module):
    """(rows_BFD, dense_BN) -> logits."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.deep = s.network(s.num_columns * s.dim + s.num_dense)

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        # squeeze(1): (B, 1) becomes (B,); the logits (B, C) of several classes are unchanged.
        return self.deep(rows_BFD.flatten(1), dense_BN).squeeze(1)


class DLRM(nn.Module):
    """(rows_BFD, dense_BN) -> logits."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        bottom = replace(s, layers=1, dropout=0.0, outputs=s.dim)
        self.bottom = bottom.network(s.num_dense) if s.num_dense else None
        self.pairs = Pairs(s.num_columns + (s.num_dense > 0))
        self.top = s.network(self.pairs.num_pairs + (s.dim if s.num_dense else s.num_columns * s.dim))

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        if self.bottom is not None:
            return self.top(self.pairs(rows_BFD, self.bottom(dense_BN))).squeeze(1)
        return self.top(torch.cat([rows_BFD.flatten(1), self.pairs(rows_BFD)], dim=1)).squeeze(1)


class DCN(nn.Module):
    """(rows_BFD, dense_BN) -> logits. A cross layer maps x to x0 * (W x + b) + x, where x0 is the input (X
    wide): products of one degree more than in x."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        inputs = s.num_columns * s.dim + s.num_dense
        self.deep = s.network(inputs)
        self.cross = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(s.cross_layers))
        self.linear = nn.Linear(inputs, s.outputs, bias=False)

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        input_BX = torch.cat([rows_BFD.flatten(1), dense_BN], dim=1)
        crossed_BX = input_BX
        for layer in self.cross:
            crossed_BX = torch.addcmul(crossed_BX, input_BX, layer(crossed_BX))
        return (self.deep(input_BX) + self.linear(crossed_BX)).squeeze(1)


_NETWORKS: dict[str, type[nn.Module]] = {"mlp": _Mlp, "dlrm": DLRM, "dcn": DCN}


class _ClickRegion(nn.Module):
    """(rows_BFD, dense_BN, labels_B) -> (loss_B, logits). loss: of a `LabelTask`.

    shares_BGL: each row's share in its bag's mean, for G bags of L rows; 0 for padding. With it, the last
    G * L of rows_BFD are the bags' rows, and the network gets their means.
    """

    def __init__(
        self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_of_two
    ) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(
        self, rows_BFD: Tensor, dense_BN: Tensor, labels_B: Tensor, shares_BGL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if shares_BGL is not None:
            bags, items = shares_BGL.shape[1:]
            rows_BFD, bag_BND = rows_BFD.split([rows_BFD.shape[1] - bags * items, bags * items], dim=1)
            items_BGLD = bag_BND.unflatten(1, (bags, items))
            means_BGD = (items_BGLD * shares_BGL.to(bag_BND.dtype)[..., None]).sum(2)
            rows_BFD = torch.cat([rows_BFD, means_BGD], dim=1)
        logits = self.network(rows_BFD, dense_BN.to(rows_BFD.dtype))
        return self.loss(logits, labels_B), logits


class _ClickModel(nn.Module):
    """Looks up the rows of all columns and passes them to the region.

    table: the rows of all columns, one after the other. num_ids: how many each column has. num_bags: number
    of bag columns, which come last.
    """

    def __init__(self, table: HostEmbedding, num_ids: list[int], region: DataParallel, num_bags: int) -> None:
        super().__init__()
        self.table, self.region, self.num_bags = table, region, num_bags
        self.num_single = len(num_ids) - num_bags
        starts = itertools.accumulate(num_ids[:-1], initial=0)
        self.starts_F = torch.tensor(list(starts), device="cpu")  # no buffer: ids stay on the host

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up, so that their rows can be prefetched."""
        ids_BF = batch["ids_BF"] + self.starts_F[: self.num_single]
        if self.num_bags:
            bags_BGL = batch["bags_BFL"]
            # Padding looks up its bag's first item again, with a share of 0: the optimizer must not touch a
            # row that the bag does not hold.
            items_BGL = torch.where(bags_BGL < 0, bags_BGL[:, :, :1], bags_BGL)
            items_BGL = items_BGL + self.starts_F[self.num_single :, None]
            ids_BF = torch.cat([ids_BF, items_BGL.flatten(1)], dim=1)
        return {"table": ids_BF}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows_BFD = self.region.rows(self.table, self.table_ids(batch)["table"])
        inputs = [batch["dense_BN"], batch["labels_B"]]
        if self.num_bags:
            # No division by 0: an empty bag holds the row for missing values.
            is_item_BGL = batch["bags_BFL"] >= 0
            inputs.append(is_item_BGL / is_item_BGL.sum(2, keepdim=True))
        loss_B, logits = self.region(rows_BFD, *inputs)
        weights_B = torch.ones_like(loss_B)
        if "weights_B" in batch:
            weights_B = batch["weights_B"].to(loss_B)
            loss_B = loss_B * weights_B
        return {"loss": loss_B, "weight": weights_B, "logits": logits}


def build_ctr(context: ModelContext[CtrModelConfig]) -> _ClickModel:
    o = context.options.settled()
    num_ids, num_dense = [int(n) for n in context.info["num_ids"]], int(context.info["num_dense"])
    # A flag of a missing number is an input as it is.
    flags = [int(column) for column in context.info.get("flags", [])]
    values = [column for column in range(num_dense) if column not in flags]
    task = label_task(context.info)
    widths = (len(num_ids), o.dim, len(values) * (1 + o.bin_width) + len(flags), o.hidden, o.layers)
    sizes = Sizes(*widths, float(o.dropout), task.num_outputs, o.cross_layers)
    network = _NETWORKS[o.kind](sizes)
    if num_dense:
        network = OnNumbers(network, EmbeddedBins(bins_of(context.rows, values, o.bins), o.bin_width, flags))
    # dlrm multiplies rows: products of tiny ones would stay near 0 for long. The rows of mlp learn slowly
    # (see `Ctr.sized`), so they differ from the start.
    std = 0.1 if o.kind == "dlrm" else 0.05
    table = context.table(sum(num_ids), o.dim, name="table", std=std)
    num_bags = int(context.info.get("num_bags", 0))
    region = DataParallel(_ClickRegion(network, task.loss), context.devices)
    return _ClickModel(table, num_ids, region, num_bags)


def some_unknown(info: Mapping[str, Any], share: float) -> Draw:
    """Return a draw that replaces a share of each column's ids by the unknown one, anew in each epoch. info:
    facts about the prepared data."""
    num_columns = len(info["num_ids"]) - int(info.get("num_bags", 0))

    def draw(batch: dict[str, Tensor], draws: Draws) -> dict[str, Tensor]:
        replaced_BF = torch.from_numpy(draws.uniform(num_columns) < share)
        return {"ids_BF": batch["ids_BF"].masked_fill(replaced_BF, UNKNOWN_ID)}

    return draw
