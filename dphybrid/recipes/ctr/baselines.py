"""Baselines to compare a table's model with: a constant, and a linear model.

Letters: B rows, F id columns, L items of a bag, N numbers, C classes, V ids.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphybrid.data.batches import Dataset, evenly_spaced
from dphybrid.data.store import Prepared
from dphybrid.training.label_tasks import LabelTask, label_task

_LINEAR_ROWS = 2**16
"""The linear model is fitted on at most this many evenly spaced training rows, divided by the number of its
outputs."""
_LOOKED_AT = 2**18
"""Baselines are evaluated on at most this many evenly spaced rows."""


def baselines(data: Prepared) -> dict[str, dict[str, float]]:
    """Return the metrics on the validation rows of two predictions: the most frequent class (for numbers:
    their mean), and a linear model of the same encoded rows. Computed once for prepared data."""
    return data.fact("baselines-4", lambda: _baselines(data))


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
    """Return the logits on the validation rows of scikit-learn's linear model, with its default penalty. Its
    inputs are one-hot columns of the ids, and the numbers."""
    # Imported here, as this takes a second.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

    inputs, labels_B = _inputs(train, info), train["labels_B"].double().numpy()
    weights_B = train.get("weights_B", torch.ones(len(labels_B))).double().numpy()
    if task.label.task == "counts":
        model = PoissonRegressor(alpha=1 / weights_B.sum())
    elif task.label.task == "regression":
        model = Ridge(solver="sparse_cg")
    else:
        model = LogisticRegression(class_weight="balanced" if info.get("class_weights") else None)
    classes = np.unique(labels_B).astype(int)
    if isinstance(model, LogisticRegression) and len(classes) < 2:
        return _constant_outputs(train, valid, task)["logits"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline may stop early
        model.fit(inputs, labels_B, sample_weight=weights_B)
    if not isinstance(model, LogisticRegression):
        return torch.from_numpy(_inputs(valid, info) @ model.coef_ + model.intercept_).float()
    scores = torch.from_numpy(model.decision_function(_inputs(valid, info))).float()
    if task.num_outputs == 1:
        return scores
    # A class without training rows gets a probability near 0.
    logits = torch.full((len(scores), task.num_outputs), -30.0)
    logits[:, classes] = scores if scores.dim() > 1 else torch.stack([torch.zeros_like(scores), scores], 1)
    return logits


def _inputs(batch: Mapping[str, Tensor], info: Mapping[str, Any]) -> Any:
    """Return the rows as a sparse matrix (B, V + N): one-hot columns for the ids (an item of a bag counts
    1 / the bag's size), then the numbers."""
    from scipy.sparse import csr_matrix

    starts_F = torch.tensor([0, *info["num_ids"]]).cumsum(0)
    ids_BF, num_ids = batch["ids_BF"], int(starts_F[-1])
    columns, values = [ids_BF + starts_F[: ids_BF.shape[1]]], [torch.ones(ids_BF.shape)]
    if "bags_BFL" in batch:
        bags_BFL = batch["bags_BFL"]
        is_item_BFL = bags_BFL >= 0
        # Padding (-1) becomes some column with the value 0.
        columns.append((bags_BFL.clamp(min=0) + starts_F[ids_BF.shape[1] : -1, None]).flatten(1))
        values.append((is_item_BFL / is_item_BFL.sum(2, keepdim=True).clamp(min=1)).flatten(1))
    dense_BN = batch["dense_BN"].float()
    columns.append((num_ids + torch.arange(dense_BN.shape[1])).expand(dense_BN.shape))
    found, shares = torch.cat(columns, 1), torch.cat([*values, dense_BN], 1).double()
    ends = np.arange(len(found) + 1) * found.shape[1]
    shape = len(found), num_ids + dense_BN.shape[1]
    return csr_matrix((shares.flatten().numpy(), found.flatten().numpy(), ends), shape)


def _spaced(rows: Dataset, most: int) -> dict[str, Tensor]:
    return rows.fetch(evenly_spaced(len(rows), most))
