"""Click-through models: one host table for all id columns, and one region with the network over rows and
numbers, and the loss.

- mlp: hidden layers over rows and numbers side by side;
- wide-deep: Wide & Deep (Cheng et al. 2016): a one-wide column of each row is the wide part, the others feed
  a deep network;
- deepfm: DeepFM (Guo et al. 2017): the same, with a factorization machine over all pairs of rows instead of
  the wide part alone;
- dlrm: DLRM (Naumov et al. 2019): dot products of all pairs of rows and of a network's view of the numbers
  feed a second network;
- dcn: DCN-v2 (Wang et al. 2021, "DCN V2: Improved Deep & Cross Network", the parallel structure): layers that
  multiply the input with a linear map of itself, beside hidden layers.

A bag enters the network as the mean of its items' rows, or, with model.attend, by attention of another
column's row over them: DIN (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction").

The linear part of wide-deep and deepfm is a row's first column. With several outputs (C classes) it is a
linear map of the whole row to the outputs instead; deepfm maps the products of pairs to the outputs, too.

Letters: B samples, F id columns, N numeric columns, G columns of bags, L items of a bag, D width of a row, V
fields (rows and numbers), P pairs, C outputs. logits are logits_B with one output, logits_BC with more.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import dphybrid.kernels as kernels
from dphybrid.data.batches import Draw, Draws
from dphybrid.data.table.cells import MISSING_ID, UNKNOWN_ID
from dphybrid.embedding import HostEmbeddingCollection
from dphybrid.parallel import DataParallel
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.ctr import CtrModelConfig
from dphybrid.recipes.ctr.numbers import EmbeddedBins, OnNumbers, Squashed, bins_of
from dphybrid.recipes.ctr.pairs import Pairs
from dphybrid.training.label_tasks import cross_entropy_of_two, label_task
from dphybrid.util.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network: its inputs (num_columns rows of width dim, and num_dense numbers, of which `pieces`
    encode one number of the table, and the last `flags` are each a flag), its hidden layers, its outputs per
    sample, and dcn's cross layers."""

    num_columns: int
    dim: int
    num_dense: int
    hidden: int
    layers: int
    dropout: float
    outputs: int = 1
    pieces: int = 1
    flags: int = 0
    cross_layers: int = 2
    cross_rank: int = 0

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
        if self.training and kernels.may_train(self.weight, self.bias, *inputs):
            found: Tensor = _SideBySide.apply(self.weight, self.bias, *inputs)
            return found
        return _side_by_side(self.weight, self.bias, *inputs)


def _side_by_side(weight: Tensor, bias: Tensor, *inputs: Tensor) -> Tensor:
    weights, found = weight.split([each.shape[1] for each in inputs], dim=1), bias
    for each, part in zip(inputs, weights, strict=True):
        found = torch.addmm(found, each, part.T)
    return found


class _SideBySide(torch.autograd.Function):
    """(weight, bias, inputs) -> the linear map of the inputs side by side, with fewer copies in its gradient
    than autograd makes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *inputs)
        weights = weight.split([each.shape[1] for each in inputs], dim=1)
        found = torch.addmm(bias, inputs[0], weights[0].T)
        for each, part in zip(inputs[1:], weights[1:], strict=True):
            found.addmm_(each, part.T)  # in place, unlike `_side_by_side`
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        weight, *inputs = ctx.saved_tensors
        weights = weight.split([each.shape[1] for each in inputs], dim=1)
        weight_grad = torch.cat([grad.T @ each for each in inputs], dim=1)
        return weight_grad, grad.sum(0), *(grad @ part for part in weights)


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


class WideDeep(nn.Module):
    """(rows_BFD, dense_BN) -> logits; column 0 of a row is its wide weight."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.deep = s.network(s.num_columns * (s.dim - 1) + s.num_dense)
        self.wide = nn.Linear(s.num_dense, s.outputs) if s.num_dense else None
        self.linear = nn.Linear(s.dim, s.outputs, bias=False) if s.outputs > 1 else None

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        deep_BC = self.deep(torch.cat([rows_BFD[:, :, 1:].flatten(1), dense_BN], dim=1))
        linear = rows_BFD[:, :, 0].sum(1) if self.linear is None else self.linear(rows_BFD.sum(1))
        logits = deep_BC.squeeze(1) + linear
        return logits if self.wide is None else logits + self.wide(dense_BN).squeeze(1)


class DeepFM(nn.Module):
    """(rows_BFD, dense_BN) -> logits. A number is a field, too: its value times a learned row, summed over
    the pieces that encode the number (neighbours in dense_BN). So is a flag."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.pieces, encoded = s.pieces, s.num_dense - s.flags
        self.widths = [encoded, s.flags]
        self.dense_ND = nn.Parameter(torch.randn(s.num_dense, s.dim) * 0.01)
        self.deep = s.network((s.num_columns + encoded // s.pieces + s.flags) * (s.dim - 1))
        self.bias = nn.Parameter(torch.zeros(s.outputs))
        self.linear = nn.Linear(2 * s.dim - 1, s.outputs, bias=False) if s.outputs > 1 else None

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        if self.pieces == 1:
            numbers_BND = dense_BN[:, :, None] * self.dense_ND
        else:
            (encoded_BX, flags_BN), (rows_XD, rows_ND) = (
                tensor.split(self.widths, dim) for tensor, dim in ((dense_BN, 1), (self.dense_ND, 0))
            )
            by_number = (-1, self.pieces)
            dense_BNK, rows_NKD = encoded_BX.unflatten(1, by_number), rows_XD.unflatten(0, by_number)
            numbers_BND = torch.einsum("bnk,nkd->bnd", dense_BNK, rows_NKD)
            if len(rows_ND):
                numbers_BND = torch.cat([numbers_BND, flags_BN[:, :, None] * rows_ND], dim=1)
        fields_BVD = torch.cat([rows_BFD, numbers_BND], dim=1)
        linear_B, vectors_BVD = fields_BVD[:, :, 0].sum(1), fields_BVD[:, :, 1:]
        # The sum over pairs is half of (square of the sum - sum of the squares).
        pairs_BD = vectors_BVD.sum(1).square() - vectors_BVD.square().sum(1)
        if self.linear is None:
            shallow = linear_B + 0.5 * pairs_BD.sum(1)
        else:
            shallow = self.linear(torch.cat([fields_BVD.sum(1), 0.5 * pairs_BD], dim=1))
        return shallow + self.deep(vectors_BVD.flatten(1)).squeeze(1) + self.bias


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
    wide): products of one degree more than in x. W has `rank` dimensions (0: all of them), as a product of
    two thin matrices."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        inputs = s.num_columns * s.dim + s.num_dense
        self.deep = s.network(inputs)
        thin = [s.cross_rank] if s.cross_rank else []
        widths = [inputs, *thin, inputs]
        self.cross = nn.ModuleList(
            nn.Sequential(
                *(
                    nn.Linear(narrow, wide, bias=layer == len(widths) - 2)
                    for layer, (narrow, wide) in enumerate(itertools.pairwise(widths))
                )
            )
            for _ in range(s.cross_layers)
        )
        self.linear = nn.Linear(inputs, s.outputs, bias=False)

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor) -> Tensor:
        input_BX = torch.cat([rows_BFD.flatten(1), dense_BN], dim=1)
        crossed_BX = input_BX
        for layer in self.cross:
            crossed_BX = torch.addcmul(crossed_BX, input_BX, layer(crossed_BX))
        return (self.deep(input_BX) + self.linear(crossed_BX)).squeeze(1)


_NETWORKS: dict[str, type[nn.Module]] = {
    "mlp": _Mlp,
    "wide-deep": WideDeep,
    "deepfm": DeepFM,
    "dlrm": DLRM,
    "dcn": DCN,
}


class Attention(nn.Module):
    """(row_BD, items_BLD, is_item_BL) -> the sum of a bag's rows, each times a weight that a small network
    gives it beside the row at hand: the activation unit of DIN. The weights are not normalized, so that the
    sum also tells how much the bag holds that matters; the paper's Dice is a PReLU here."""

    def __init__(self, dim: int, hidden: int = 36) -> None:
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(4 * dim, hidden), nn.PReLU(), nn.Linear(hidden, 1))

    def forward(self, row_BD: Tensor, items_BLD: Tensor, is_item_BL: Tensor) -> Tensor:
        row_BLD = row_BD.unsqueeze(1).expand_as(items_BLD)
        pairs_BLX = torch.cat([row_BLD, items_BLD, row_BLD - items_BLD, row_BLD * items_BLD], dim=2)
        weights_BL1 = self.unit(pairs_BLX) * is_item_BL.to(items_BLD.dtype).unsqueeze(2)
        pooled_BD: Tensor = (weights_BL1 * items_BLD).sum(1)
        return pooled_BD


class _ClickRegion(nn.Module):
    """(rows_BFD, dense_BN, labels_B) -> (loss_B, logits). loss: of a `LabelTask`.

    shares_BGL: each row's share in its bag's mean, for G bags of L rows; 0 for padding. With it, the last
    G * L of rows_BFD are the bags' rows, and the network gets one pooled row per bag. attend: a column and
    the bag that its row attends over, whose pooled row takes the place of the mean.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_of_two,
        attend: tuple[int, int] | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.network, self.loss, self.attend = network, loss, attend
        self.attention = Attention(dim) if attend else None

    def forward(
        self, rows_BFD: Tensor, dense_BN: Tensor, labels_B: Tensor, shares_BGL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if shares_BGL is not None:
            bags, items = shares_BGL.shape[1:]
            rows_BFD, bag_BND = rows_BFD.split([rows_BFD.shape[1] - bags * items, bags * items], dim=1)
            shares_BGL1 = shares_BGL.to(bag_BND.dtype)[..., None]
            items_BGLD = bag_BND.unflatten(1, (bags, items))
            if self.attention is None or self.attend is None:
                pooled = [(items_BGLD * shares_BGL1).sum(2)]
            else:
                column, bag = self.attend
                sides = (slice(bag), slice(bag + 1, None))
                before, after = ((items_BGLD[:, side] * shares_BGL1[:, side]).sum(2) for side in sides)
                found_BD = self.attention(rows_BFD[:, column], items_BGLD[:, bag], shares_BGL[:, bag] > 0)
                pooled = [before, found_BD.unsqueeze(1), after]
            rows_BFD = torch.cat([rows_BFD, *pooled], dim=1)
        logits = self.network(rows_BFD, dense_BN.to(rows_BFD.dtype))
        return self.loss(logits, labels_B), logits


class _ClickModel(nn.Module):
    """Looks up the rows of all columns and passes them to the region. num_bags: number of bag columns, which
    come last."""

    def __init__(self, table: HostEmbeddingCollection, region: DataParallel, num_bags: int = 0) -> None:
        super().__init__()
        self.table = table
        self.region = region
        num_single = len(table.num_rows) - num_bags
        self.num_bags, self._single, self._bags = num_bags, slice(num_single), slice(num_single, None)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up, so that their rows can be prefetched."""
        ids_BF = self.table.flat_ids(batch["ids_BF"], self._single)
        if self.num_bags:
            bags_BGL = batch["bags_BFL"]
            # Padding looks up its bag's first item again, with a share of 0: the optimizer must not touch a
            # row that the bag does not hold.
            items_BGL = torch.where(bags_BGL < 0, bags_BGL[:, :, :1], bags_BGL)
            items_BGL = self.table.flat_ids(items_BGL.mT, self._bags).mT
            ids_BF = torch.cat([ids_BF, items_BGL.flatten(1)], dim=1)
        return {"table": ids_BF}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows_BFD = self.region.rows(self.table.flat, self.table_ids(batch)["table"])
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
    if o.kind in ("wide-deep", "deepfm") and o.dim < 2:
        raise UserError(f"model.dim={o.dim}: {o.kind} needs at least 2, one of them for the linear part")
    embeds = bool(num_dense) and o.numbers == "embedded"
    # Network inputs for each number of the table; a flag of a missing number is one as it is. Data prepared
    # earlier names no flags: there they are numbers like others.
    pieces = 1 + o.bin_width if embeds else 1
    flags = [int(column) for column in context.info.get("flags", [])] if embeds else []
    values = [column for column in range(num_dense) if column not in flags]
    task = label_task(context.info)
    widths = (len(num_ids), o.dim, len(values) * pieces + len(flags), o.hidden, o.layers)
    outputs = (task.num_outputs, pieces, len(flags))
    sizes = Sizes(*widths, float(o.dropout), *outputs, o.cross_layers, o.cross_rank)
    network = _NETWORKS[o.kind](sizes)
    if embeds:
        network = OnNumbers(network, EmbeddedBins(bins_of(context.rows, values, o.bins), o.bin_width, flags))
    elif num_dense:
        network = OnNumbers(network, Squashed())
    # dlrm multiplies rows: products of tiny ones would stay near 0 for long. The rows of mlp learn slowly
    # (see `Ctr.sized`), so they differ from the start.
    std = {"dlrm": 0.1, "mlp": 0.05, "dcn": 0.05}.get(o.kind, 0.01)
    columns = context.info.get("columns") or [{"name": number} for number in range(len(num_ids))]
    tables = {str(column["name"]): size for column, size in zip(columns, num_ids, strict=True)}
    table = HostEmbeddingCollection(tables, o.dim, name="table", std=std, make=context.table)
    num_bags = int(context.info.get("num_bags", 0))
    attend = attended(o.attend, list(tables), num_bags) if o.attend else None
    region = DataParallel(_ClickRegion(network, task.loss, attend, o.dim), context.devices)
    return _ClickModel(table, region, num_bags)


def attended(pair: str, columns: Sequence[str], num_bags: int) -> tuple[int, int]:
    """Return the numbers of a column and of a bag, by `COLUMN:BAG`. columns: names, the bags last. Raises
    UserError if there are no such columns."""
    single, bags = columns[: len(columns) - num_bags], columns[len(columns) - num_bags :]
    # Names may contain colons.
    for at, sign in enumerate(pair):
        if sign == ":" and pair[:at] in single and pair[at + 1 :] in bags:
            return single.index(pair[:at]), bags.index(pair[at + 1 :])
    raise UserError(
        f"model.attend={pair!r}: give COLUMN:BAG, a column with one value a row and a bag; columns: "
        f"{', '.join(single) or 'none'}; bags: {', '.join(bags) or 'none (name one in data.bags)'}"
    )


def some_unknown(info: Mapping[str, Any], share: float) -> Draw:
    """Return a draw that replaces a share of each column's ids by the unknown one, anew in each epoch. info:
    facts about the prepared data."""
    num_columns = len(info["num_ids"]) - int(info.get("num_bags", 0))
    roles = [column["role"] for column in info.get("columns", [])] or ["categorical"] * num_columns
    # The buckets of a number have no unknown row: there, the row of missing values replaces an id.
    replacement_F = torch.tensor(
        [MISSING_ID if role == "buckets" else UNKNOWN_ID for role in roles[:num_columns]],
        dtype=torch.int64,  # an empty list (all columns are bags) would be float32
    )

    def draw(batch: dict[str, Tensor], draws: Draws) -> dict[str, Tensor]:
        replaced_BF = draws.chance(num_columns, share)
        return {"ids_BF": torch.where(replaced_BF, replacement_F, batch["ids_BF"])}

    return draw


def weighted_classes(weights_C: Sequence[float]) -> Draw:
    """Return a draw that multiplies the rows' weights by those of their classes."""
    of_class_C = torch.tensor(weights_C)

    def draw(batch: dict[str, Tensor], _: Draws) -> dict[str, Tensor]:
        weights_B = of_class_C[batch["labels_B"].long()]
        return {"weights_B": weights_B * batch["weights_B"] if "weights_B" in batch else weights_B}

    return draw
