"""Click-through model: one host table for all categorical columns, a deep network and a linear part in one region.

The shape of Wide & Deep (Cheng et al. 2016): a one-wide column of the row is the wide part, the others feed the network.
Letters: B samples, F id columns, N numeric columns, D width of a row.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import HostEmbedding
from dphybrid.models.registry import ModelContext
from dphybrid.parallel import DataParallel, parts


class ClickRegion(nn.Module):
    """(rows_BFD, dense_BN, labels_B) -> (loss_B, logits_B); column 0 of a row is its wide weight."""

    def __init__(self, num_columns: int, dim: int, num_dense: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        widths = [num_columns * (dim - 1) + num_dense] + [hidden] * layers
        steps: list[nn.Module] = []
        for narrow, wide in itertools.pairwise(widths):
            steps += [nn.Linear(narrow, wide), nn.ReLU(), nn.Dropout(dropout)]
        self.deep = nn.Sequential(*steps, nn.Linear(widths[-1], 1))
        self.wide = nn.Linear(num_dense, 1) if num_dense else None

    def forward(self, rows_BFD: Tensor, dense_BN: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        dense_BN = dense_BN.to(rows_BFD.dtype)
        deep_B1 = self.deep(torch.cat([rows_BFD[:, :, 1:].flatten(1), dense_BN], dim=1))
        logits_B = deep_B1.squeeze(1) + rows_BFD[:, :, 0].sum(1)
        if self.wide is not None:
            logits_B = logits_B + self.wide(dense_BN).squeeze(1)
        loss_B = F.binary_cross_entropy_with_logits(logits_B, labels_B.to(logits_B.dtype), reduction="none")
        return loss_B, logits_B


class ClickModel(nn.Module):
    """Shifts column-local ids into one table and hands the rows to the region."""

    def __init__(self, table: HostEmbedding, num_ids: list[int], region: DataParallel) -> None:
        super().__init__()
        self.table = table
        self.region = region
        table.place_on(region.devices.replicas, region.sizes)
        self.num_ids = num_ids
        self._offsets_F = torch.tensor([0, *itertools.accumulate(num_ids[:-1])], dtype=torch.int64)

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The ids that `forward` will look up, so that their rows can be fetched ahead."""
        return {"table": batch["ids_BF"] + self._offsets_F}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows_BFD = parts(self.table.replica_rows(self.table_ids(batch)["table"]))
        loss_B, logits_B = self.region(rows_BFD, batch["dense_BN"], batch["labels_B"])
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "logits": logits_B}


def build_ctr(context: ModelContext) -> ClickModel:
    o = context.options
    num_ids, num_dense = [int(n) for n in context.info["num_ids"]], int(context.info["num_dense"])
    region = ClickRegion(len(num_ids), o.dim, num_dense, o.hidden, o.layers, o.dropout)
    table = context.table(sum(num_ids), o.dim, name="table", std=0.01)
    return ClickModel(table, num_ids, DataParallel(region, context.devices))
