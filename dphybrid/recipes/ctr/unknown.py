"""Ids replaced by the unknown one while training: what comes in place of a value that was never met must be
learnt, too.

Letters: B samples, F id columns.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dphybrid.data.draws import Draw, Draws
from dphybrid.data.table.cells import MISSING_ID, UNKNOWN_ID


def some_unknown(info: Mapping[str, Any], share: float) -> Draw:
    """Return what replaces a share of each column's ids, other ones in each epoch. info: of the prepared
    data."""
    num_columns = len(info["num_ids"]) - int(info.get("num_bags", 0))
    roles = [column["role"] for column in info.get("columns", [])] or ["categorical"] * num_columns
    stand_in_F = torch.tensor(
        [MISSING_ID if role == "buckets" else UNKNOWN_ID for role in roles[:num_columns]],
        dtype=torch.int64,  # also where all columns are bags
    )

    def draw(batch: dict[str, Tensor], draws: Draws) -> dict[str, Tensor]:
        replaced_BF = torch.from_numpy(draws.uniform(num_columns) < share)
        return {"ids_BF": torch.where(replaced_BF, stand_in_F, batch["ids_BF"])}

    return draw
