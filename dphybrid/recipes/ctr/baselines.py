"""Baselines to compare a table's model with: a constant, and a linear model.

Letters: B rows, F id columns, N numbers, C classes, V ids, E ids of a row with those of its bags, X inputs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from dphybrid.data.batches import Dataset, evenly_spaced
from dphybrid.data.store import Prepared
from dphybrid.training.label_tasks import LabelTask, label_task
from dphybrid.util.compiling import eager

_LINEAR_ROWS = 2**16
"""The linear model is fitted on at most this many evenly spaced training rows, divided by the number of its
outputs."""
_ITERATIONS = 20
"""Iterations of the linear model's optimizer."""
_LOOKED_AT = 2**18
"""Baselines are evaluated on at most this many evenly spaced rows."""


def baselines(data: Prepared) -> dict[str, dict[str, float]]:
    """Return the metrics on the validation rows of two predictions: the most frequent class (for numbers:
    their mean), and a linear model of the same encoded rows. Computed once for prepared data."""
    return data.fact("baselines-3", lambda: _baselines(data))


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
    labels_B, rows = train["labels_B"], len(valid["labels_B"])
    weights_B = train.get("weights_B", torch.ones_like(labels_B)).double()
    if task.label.task in ("binary", "multiclass"):
        counts_C = torch.bincount(labels_B.long(), weights_B, minlength=max(2, task.num_outputs))
        # + 1e-3: a class that these rows lack would have the logarithm of 0.
        logits_C = (counts_C + 1e-3).log()
        constant = logits_C if task.num_outputs > 1 else logits_C[1] - logits_C[0]
    else:
        # Encoded labels have a mean of 0, counts a mean of 1, whose logarithm is 0.
        constant = torch.zeros(())
    return _outputs(constant.expand(rows, *constant.shape).float(), valid, task)


def _outputs(logits: Tensor, valid: Mapping[str, Tensor], task: LabelTask) -> dict[str, Tensor]:
    weights_B = valid.get("weights_B", torch.ones(len(logits)))
    loss_B = task.loss(logits, valid["labels_B"]) * weights_B
    return {"logits": logits, "labels_B": valid["labels_B"], "loss": loss_B, "weight": weights_B}


def _linear(
    train: Mapping[str, Tensor], valid: Mapping[str, Tensor], info: Mapping[str, Any], task: LabelTask
) -> Tensor:
    """Return the logits on the validation rows of a linear model: of the weights w that minimize the summed
    loss + |w|^2 / 2, as scikit-learn's LogisticRegression by default. Its inputs are one-hot columns of the
    ids, then the numbers; the intercept has no penalty.

    L-BFGS on inputs that are scaled by a bound of the loss's curvature: 20 iterations come closer to the
    minimum than 100 without it, and importing scikit-learn alone takes longer.
    """
    rows, labels_B = _Inputs(train, info), train["labels_B"]
    weights_B = train.get("weights_B", torch.ones(len(labels_B))).float()
    if info.get("class_weights"):
        counts_C = torch.bincount(labels_B.long())
        weights_B = weights_B * (len(labels_B) / ((counts_C > 0).sum() * counts_C))[labels_B.long()]
    scale_X1 = (1 + 0.25 * rows.squares_X(weights_B))[:, None].rsqrt()
    scaled_XC = torch.zeros(len(scale_X1), task.num_outputs, requires_grad=True)
    lbfgs: Any = eager(torch.optim.LBFGS)
    optimizer = lbfgs([scaled_XC], max_iter=_ITERATIONS, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> float:
        weights_XC = scaled_XC.detach() * scale_X1
        logits = rows.times(weights_XC).requires_grad_()
        with torch.enable_grad():
            loss = (task.loss(logits, labels_B) * weights_B).sum()
        (grad_B,) = torch.autograd.grad(loss, logits)
        penalized_XC = weights_XC.clone()
        penalized_XC[-1] = 0
        scaled_XC.grad = (rows.transposed_times(grad_B) + penalized_XC) * scale_X1
        return float(loss.detach() + 0.5 * penalized_XC.square().sum())

    optimizer.step(closure)
    logits = _Inputs(valid, info).times(scaled_XC.detach() * scale_X1)
    if task.num_outputs > 1:  # a class without training rows gets a probability near 0
        logits[:, torch.bincount(labels_B.long(), minlength=task.num_outputs) == 0] = -30.0
    return logits


class _Inputs:
    """The rows as inputs X of a linear model, a sparse matrix (B, X): V one-hot columns for the ids (an item
    of a bag counts 1 / the bag's size), then the numbers and the intercept."""

    def __init__(self, batch: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        starts_F = torch.tensor([0, *info["num_ids"]]).cumsum(0)
        ids_BF, self.num_ids = batch["ids_BF"], int(starts_F[-1])
        ids, self.shares_BE = [ids_BF + starts_F[: ids_BF.shape[1]]], None
        if "bags_BFL" in batch:
            bags_BFL = batch["bags_BFL"]
            # Padding (-1) becomes some column with the value 0.
            is_item_BFL = bags_BFL >= 0
            ids.append((bags_BFL.clamp(min=0) + starts_F[ids_BF.shape[1] : -1, None]).flatten(1))
            shares_BFL = is_item_BFL / is_item_BFL.sum(2, keepdim=True).clamp(min=1)
            self.shares_BE = torch.cat([torch.ones(ids_BF.shape), shares_BFL.flatten(1)], 1)
        self.ids_BE = torch.cat(ids, 1)
        dense_BN = batch["dense_BN"].float()
        self.dense_BN = torch.cat([dense_BN, torch.ones(len(dense_BN), 1)], 1)

    def times(self, weights_XC: Tensor) -> Tensor:
        """Return the matrix times weights: (B,) of one output, else (B, C)."""
        weights_VC, weights_NC = weights_XC.split([self.num_ids, self.dense_BN.shape[1]])
        of_ids_BC = embedding_bag(self.ids_BE, weights_VC, mode="sum", per_sample_weights=self.shares_BE)
        found_BC = of_ids_BC + self.dense_BN @ weights_NC
        return found_BC.squeeze(1) if found_BC.shape[1] == 1 else found_BC

    def transposed_times(self, values_BC: Tensor) -> Tensor:
        """Return the transposed matrix times values of the rows: (X, C)."""
        columns = [self._summed(each_B) for each_B in values_BC.view(len(values_BC), -1).T]
        return torch.cat([torch.stack(columns, 1), self.dense_BN.T @ values_BC.view(len(values_BC), -1)])

    def squares_X(self, weights_B: Tensor) -> Tensor:
        """Return the weighted sum of the squares of each input (one-hot: of the values themselves)."""
        return torch.cat([self._summed(weights_B), self.dense_BN.square().T @ weights_B])

    def _summed(self, values_B: Tensor) -> Tensor:
        values_BE = values_B[:, None].expand(self.ids_BE.shape)
        values_BE = values_BE if self.shares_BE is None else values_BE * self.shares_BE
        # Half the time of bincount.
        return torch.zeros(self.num_ids).scatter_add_(0, self.ids_BE.flatten(), values_BE.flatten())


def _spaced(rows: Dataset, most: int) -> dict[str, Tensor]:
    return rows.fetch(evenly_spaced(len(rows), most))
