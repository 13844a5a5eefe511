"""Permutation importance: by how much a model's deciding metric gets worse when a column's cells are shuffled
among the rows (Breiman 2001, "Random Forests", section 10).

Letters: B rows, F id columns, N numbers, G bags.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from dphybrid.data.batches import ArrayDataset, Dataset, evenly_spaced
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import Task
from dphybrid.util.errors import UserError

Positions = Mapping[str, Sequence[tuple[str, int]]]
"""For each column of a table where its cells are: pairs of an array's name and a position on its dim 1."""
_MOST_ROWS, _FEWEST_ROWS, _CELLS = 4096, 256, 2**16
"""Rows are shuffled at most so many, and so few that together with the columns they stay below so many
cells."""
SECONDS = 30.0
"""After this time no further column is shuffled."""


def in_memory(rows: Mapping[str, Tensor]) -> ArrayDataset:
    """Return rows that are in memory as a data set."""
    arrays = {name: tensor.numpy() for name, tensor in rows.items()}
    return ArrayDataset(arrays, np.arange(len(next(iter(arrays.values())))))


def num_rows(rows: int, columns: int) -> int:
    """Return how many of the rows importance is measured on."""
    return min(rows, _MOST_ROWS, max(_FEWEST_ROWS, _CELLS // max(1, columns)))


def importance(
    model: nn.Module,
    data: Dataset,
    task: Task,
    positions: Positions,
    batch_size: int,
    on_progress: Callable[[str, int, int], None] | None = None,
    seconds: float = SECONDS,
) -> dict[str, float]:
    """Return the columns' importance, the largest first: what the deciding metric loses. Columns that
    `seconds` did not suffice for, or whose shuffled rows have no loss, are missing; all are if the rows are
    too few for the metric.

    data: rows as the model takes them, of which some thousand are used, evenly spaced.
    """
    index_B = evenly_spaced(len(data), num_rows(len(data), len(positions)))
    rows, random = data.fetch(index_B), torch.Generator().manual_seed(0)

    def metric(these: Mapping[str, Tensor]) -> float:
        return task.compute(validation_outputs(model, in_memory(these), batch_size, task))[task.metric]

    try:
        whole, sign = metric(rows), 1 if task.higher_is_better else -1
    except UserError:  # rows of one class have no AUC
        return {}
    lost, until = dict[str, float](), time.monotonic() + seconds
    for number, (name, of_column) in enumerate(positions.items()):
        if time.monotonic() > until:
            break
        if on_progress:
            on_progress("shuffle columns", number, len(positions))
        order_B = torch.randperm(len(index_B), generator=random)
        shuffled = dict(rows)
        for array, position in of_column:
            if shuffled[array] is rows[array]:
                shuffled[array] = rows[array].clone()
            shuffled[array][:, position] = rows[array][order_B, position]
        with suppress(UserError):  # a model that has no finite loss for such rows
            lost[name] = sign * (whole - metric(shuffled))
    return dict(sorted(lost.items(), key=lambda item: -item[1]))
