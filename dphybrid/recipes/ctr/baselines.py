"""Baselines to compare a table's model with: a constant, and a linear model.

Letters: B rows, F id columns, L items of a bag, N numbers, C classes, V ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphybrid.data.batches import Dataset, evenly_spaced
from dphybrid.data.store import Prepared
from dphybrid.training.label_tasks import LabelTask, label_task
from dphybrid.util.compiling import eager

_LINEAR_ROWS = 2**16
"""The linear model is fitted on at most this many evenly spaced training rows, divided by the number of its
outputs."""
_ITERATIONS = 20
"""Steps of the linear model's optimizer."""
_LOOKED_AT = 2**18
"""Baselines are evaluated on at most this many evenly spaced rows."""


def baselines(data: Prepared) -> dict[str, dict[str, float]]:
    """Return the metrics on the validation rows of two predictions: the most frequent class (for numbers:
    their mean), and a linear model of the same encoded rows. Computed once for prepared data."""
    return data.fact("baselines-5", lambda: _baselines(data))


def _baselines(data: Prepared) -> dict[str, dict[str, float]]:
    task = label_task(data.info)
    train = _spaced(data.dataset("train"), _LINEAR_ROWS // task.num_outputs)
    valid = _spaced(data.dataset("valid"), _LOOKED_AT)
    name = "mean" if task.label.task in ("regression", "counts") else "majority class"
    return {
        name: task.compute(_constant_outputs(train, valid, task)),
        "linear model": task.compute(_outputs(_linear(train, valid, data.info, task), valid, task)),
    }


def floor(data: Prepared) -> dict[str, Tensor]:
    """Return the outputs of a model that always predicts the most frequent class, or the mean, on all
    validation rows."""
    valid = data.dataset("valid")
    train = _spaced(data.dataset("train"), _LOOKED_AT)
    return _constant_outputs(train, valid.fetch(np.arange(len(valid))), label_task(data.info))


def _constant_outputs(
    train: Mapping[str, Tensor], valid: Mapping[str, Tensor], task: LabelTask
) -> dict[str, Tensor]:
    """Return the outputs of a prediction that is the same for all rows, for the metrics."""
    constant = _constant(train, task)
    return _outputs(constant.expand(len(valid["labels_B"]), *constant.shape).float(), valid, task)


def _constant(train: Mapping[str, Tensor], task: LabelTask) -> Tensor:
    """Return the best logits that are the same for all rows."""
    if task.label.task not in ("binary", "multiclass"):
        # Encoded labels have a mean of 0, counts a mean of 1, whose logarithm is 0.
        return torch.zeros(())
    labels_B = train["labels_B"]
    weights_B = train.get("weights_B", torch.ones_like(labels_B)).double()
    counts_C = torch.bincount(labels_B.long(), weights_B, minlength=max(2, task.num_outputs))
    # + 1e-3: a class that these rows lack would have the logarithm of 0.
    logits_C = (counts_C + 1e-3).log().log_softmax(0)
    return logits_C if task.num_outputs > 1 else logits_C[1] - logits_C[0]


def _outputs(logits: Tensor, valid: Mapping[str, Tensor], task: LabelTask) -> dict[str, Tensor]:
    weights_B = valid.get("weights_B", torch.ones(len(logits)))
    loss_B = task.loss(logits, valid["labels_B"]) * weights_B
    return {"logits": logits, "labels_B": valid["labels_B"], "loss": loss_B, "weight": weights_B}


def _linear(
    train: Mapping[str, Tensor], valid: Mapping[str, Tensor], info: Mapping[str, Any], task: LabelTask
) -> Tensor:
    """Return the logits on the validation rows of a linear model of the ids, each a one-hot column, and the
    numbers. It minimizes the sum of the losses and half the squares of the weights, as scikit-learn's
    LogisticRegression does, whose import takes longer than this."""
    labels_B, constant = train["labels_B"], _constant(train, task).float()
    weights_B = train.get("weights_B", torch.ones(len(labels_B))).float()
    if info.get("class_weights"):
        weights_B = weights_B * torch.tensor(info["class_weights"])[labels_B.long()]
    rows = _columns(train)
    # Each weight is searched in units of a bound of its loss's curvature: 20 steps of L-BFGS then come closer
    # to the minimum than 100 without.
    seen = [
        torch.bincount(ids_BL.flatten(), (weights_B[:, None] * shares_BL).flatten(), minlength=num_ids)
        for (ids_BL, shares_BL), num_ids in zip(rows[0], info["num_ids"], strict=True)
    ]
    curved = *seen, rows[1].square().T @ weights_B, weights_B.sum()
    units = [(1 + 0.25 * each.view((*each.shape, *[1] * constant.dim()))).rsqrt() for each in curved]
    searched = [torch.zeros(*unit.shape[:1], *constant.shape) for unit in units[:-1]]
    searched = [each.requires_grad_() for each in (*searched, constant / units[-1])]
    lbfgs: Any = eager(torch.optim.LBFGS)  # torch's own imports the compiler
    fit = lbfgs(searched, max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def found() -> list[Tensor]:
        return [each * unit for each, unit in zip(searched, units, strict=True)]

    def cost() -> Tensor:
        fit.zero_grad()
        *weights, bias = found()
        total = (task.loss(_logits(weights, bias, *rows), labels_B) * weights_B).sum()
        total = total + sum(0.5 * each.square().sum() for each in weights)
        total.backward()
        return total

    fit.step(torch.enable_grad()(cost))
    with torch.no_grad():
        *weights, bias = found()
        logits = _logits(weights, bias, *_columns(valid))
    if task.num_outputs > 1:  # a class without training rows gets a probability near 0
        logits[:, labels_B.long().bincount(minlength=task.num_outputs) == 0] = -30.0
    return logits


def _columns(rows: Mapping[str, Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the ids of each column or bag with their shares in the row, 1 / the bag's size, and the
    numbers."""
    found = [(ids_B.contiguous().unsqueeze(1), torch.ones(1)) for ids_B in rows["ids_BF"].unbind(1)]
    for ids_BL in rows["bags_BFL"].unbind(1) if "bags_BFL" in rows else ():
        is_item_BL = ids_BL >= 0
        shares_BL = is_item_BL / is_item_BL.sum(1, keepdim=True).clamp(min=1)
        found.append((ids_BL.clamp(min=0), shares_BL))  # padding becomes some id with a share of 0
    return found, rows["dense_BN"].float()


def _logits(
    weights: Sequence[Tensor], bias: Tensor, columns: Sequence[tuple[Tensor, Tensor]], dense_BN: Tensor
) -> Tensor:
    """Return logits_B, or logits_BC. weights: of each column's ids, then of the numbers."""
    logits = dense_BN @ weights[-1] + bias
    for (ids_BL, shares_BL), weight in zip(columns, weights, strict=False):
        # Three times as fast as indexing, with its gradient.
        found = weight.index_select(0, ids_BL.flatten()).view(*ids_BL.shape, *bias.shape)
        logits = logits + (found * shares_BL.view(*shares_BL.shape, *[1] * bias.dim())).sum(1)
    return logits


def _spaced(rows: Dataset, most: int) -> dict[str, Tensor]:
    return rows.fetch(evenly_spaced(len(rows), most))
