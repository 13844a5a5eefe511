"""The paired bootstrap of metrics (Efron 1979): intervals from rows drawn again with replacement."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dphybrid.training.metrics import Task
from dphybrid.util.errors import UserError


def resampled(
    task: Task,
    outputs: Sequence[dict[str, Tensor]],
    num_resamples: int,
    seed: int,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[list[dict[str, float]]]:
    """Return the metrics of each model's outputs for the same rows (B), on `num_resamples` resamples of them.
    A resample without a metric, because all of its rows have one label, is left out."""
    num_rows = len(next(iter(outputs[0].values())))
    random, metrics = np.random.default_rng(seed), []
    for number in range(num_resamples):
        if on_progress and number % 20 == 0:
            on_progress("draw rows again", number, num_resamples)
        # The same rows for all models, so that how difficult the drawn rows are cancels out.
        rows_B = torch.from_numpy(random.integers(0, num_rows, num_rows))
        try:
            drawn = [{name: v[rows_B] for name, v in of_model.items()} for of_model in outputs]
            metrics.append(list(map(task.compute, drawn)))
        except UserError:
            continue
    return metrics


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles of what was measured on resamples; NaN without any. NaN does not
    count: the metric of rows whose weights are all 0."""
    numbers = [value for value in values if value == value]
    if not numbers:
        return np.nan, np.nan
    low, high = np.quantile(numbers, (0.025, 0.975)).tolist()
    return low, high
