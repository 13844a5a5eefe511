"""Baselines of a trained table, a constant and a linear model; and columns that give the label away.

Letters: B rows, F id columns, N numbers, C classes, K values of a column.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from dphybrid.data.batches import Array, Dataset
from dphybrid.data.store import Prepared
from dphybrid.training.label_tasks import LabelTask, label_task

_LINEAR_ROWS = 2**16
"""Training rows, evenly spaced, that the linear model sees at most, over all outputs together."""
LOOKED_AT = 2**18
"""Rows, evenly spaced, that baselines are compared on and columns are looked at in, at most."""
_LEAK = 0.99
"""AUC or R2 of one column above which it gives the label away."""
_FEWEST_ROWS = 50
"""Rows below which a column predicts the label by chance."""


def baselines(data: Prepared) -> dict[str, dict[str, float]]:
    """Return the metrics, on the validation rows, of the most frequent class (of numbers: their mean) and of
    a linear model on the same encoded rows."""
    task = label_task(data.info)
    train = _spaced(data.dataset("train"), _LINEAR_ROWS // task.num_outputs)
    valid = _spaced(data.dataset("valid"), LOOKED_AT)
    name = "mean" if task.label.task in ("regression", "counts") else "majority class"
    return {
        name: task.compute(_constant_outputs(train, valid, task)),
        "linear model": task.compute(_outputs(_linear(train, valid, data.info, task), valid, task)),
    }


def floor(data: Prepared) -> dict[str, Tensor]:
    """Return the outputs of the most frequent class, or of the mean, on all validation rows."""
    valid = data.dataset("valid")
    train = _spaced(data.dataset("train"), LOOKED_AT)
    return _constant_outputs(train, valid.fetch(np.arange(len(valid))), label_task(data.info))


def _constant_outputs(
    train: Mapping[str, Tensor], valid: Mapping[str, Tensor], task: LabelTask
) -> dict[str, Tensor]:
    """Return what metrics are computed from, for a prediction that is the same for all rows."""
    labels_B, rows = train["labels_B"], len(valid["labels_B"])
    weights_B = train.get("weights_B", torch.ones_like(labels_B)).double()
    if task.label.task in ("binary", "multiclass"):
        counts_C = torch.bincount(labels_B.long(), weights_B, minlength=max(2, task.num_outputs))
        logits_C = (counts_C + 1e-3).log()
        constant = logits_C if task.num_outputs > 1 else logits_C[1] - logits_C[0]
    else:
        constant = torch.zeros(())  # of labels with a mean of 0, or the logarithm of a mean of 1
    return _outputs(constant.expand(rows, *constant.shape).float(), valid, task)


def _outputs(logits: Tensor, valid: Mapping[str, Tensor], task: LabelTask) -> dict[str, Tensor]:
    weights_B = valid.get("weights_B", torch.ones(len(logits)))
    loss_B = task.loss(logits, valid["labels_B"]) * weights_B
    return {"logits": logits, "labels_B": valid["labels_B"], "loss": loss_B, "weight": weights_B}


def _linear(
    train: Mapping[str, Tensor], valid: Mapping[str, Tensor], info: Mapping[str, object], task: LabelTask
) -> Tensor:
    """Return the logits of a linear model of scikit-learn, with its own penalty, on the validation rows."""
    from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

    rows, wanted, labels_B = _sparse(train, info), _sparse(valid, info), train["labels_B"].numpy()
    weights_B = train["weights_B"].numpy() if "weights_B" in train else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an approximate optimum is good enough
        if task.label.task in ("binary", "multiclass"):
            classes = np.unique(labels_B)
            if len(classes) < 2:
                return _constant_outputs(train, valid, task)["logits"]
            model = LogisticRegression(max_iter=100).fit(rows, labels_B, weights_B)
            found = torch.from_numpy(model.decision_function(wanted)).float()
            if task.num_outputs == 1:
                return found
            if found.dim() == 1:  # two of the classes alone
                found = torch.stack([-found, found], 1)
            logits_BC = torch.full((len(found), task.num_outputs), -30.0)
            logits_BC[:, torch.from_numpy(classes).long()] = found
            return logits_BC
        if task.label.task == "counts":
            means_B = PoissonRegressor(max_iter=100).fit(rows, labels_B, weights_B).predict(wanted)
            return torch.from_numpy(np.log(np.maximum(means_B, 1e-9))).float()
        return torch.from_numpy(Ridge().fit(rows, labels_B, weights_B).predict(wanted)).float()


def _sparse(batch: Mapping[str, Tensor], info: Mapping[str, Any]) -> sparse.csr_matrix:
    """Return a column for each id, ones where a row has it (shares, in bags), and the numbers."""
    starts_F = torch.tensor([0, *info["num_ids"]]).cumsum(0)
    ids_BF, width = batch["ids_BF"], int(starts_F[-1])
    ones = [ids_BF + starts_F[: ids_BF.shape[1]]]
    shares = [torch.ones(ids_BF.shape)]
    if "bags_BFL" in batch:
        bags_BFL = batch["bags_BFL"]
        there_BFL = bags_BFL >= 0
        items_BFL = bags_BFL.clamp(min=0) + starts_F[ids_BF.shape[1] : -1, None]
        ones.append(items_BFL.flatten(1))
        shares.append((there_BFL / there_BFL.sum(2, keepdim=True).clamp(min=1)).flatten(1))
    columns, values = torch.cat(ones, 1), torch.cat(shares, 1)
    ends = np.arange(len(columns) + 1) * columns.shape[1]
    place = (values.numpy().ravel(), columns.numpy().ravel(), ends)
    of_ids = sparse.csr_matrix(place, shape=(len(columns), width))
    return sparse.hstack([of_ids, sparse.csr_matrix(batch["dense_BN"].numpy())]).tocsr()


def leaks(data: Prepared) -> list[str]:
    """Return a warning for each column that alone tells nearly all of the label: AUC or R2 above `_LEAK`, of
    the mean label of its values, fitted on one half of the training rows and asked about the other."""
    batch, task = _spaced(data.dataset("train"), LOOKED_AT), label_task(data.info)
    labels_B = batch["labels_B"].numpy().astype(np.float64)
    if len(labels_B) < _FEWEST_ROWS or np.ptp(labels_B) == 0:
        return []
    names = [str(column["name"]) for column in data.info.get("columns", [])]
    found: dict[str, tuple[str, float]] = {}
    columns = zip(names, batch["ids_BF"].numpy().T, strict=False)  # those after them are bags
    for name, ids_B in columns:
        found[name] = _told_by_values(ids_B, labels_B, task)
    for name, numbers_B in zip(data.info.get("dense", []), batch["dense_BN"].numpy().T, strict=True):
        metric, value = _told_by_number(numbers_B, labels_B, task)
        found[name] = max(found.get(name, (metric, value)), (metric, value), key=lambda one: one[1])
    return [
        f"column {name!r} alone predicts the label ({metric} {value:.4f}); if it is not known before the "
        f"answer is, leave it out: --data.ignore {name}"
        for name, (metric, value) in found.items()
        if value > _LEAK
    ]


def _told_by_values(ids_B: Array, labels_B: Array, task: LabelTask) -> tuple[str, float]:
    even_B = np.arange(len(ids_B)) % 2 == 0
    if task.label.task == "multiclass":
        counts_KC = np.zeros((ids_B.max() + 1, task.num_outputs))
        np.add.at(counts_KC, (ids_B[even_B], labels_B[even_B].astype(int)), 1)
        right_B = counts_KC.argmax(1)[ids_B[~even_B]] == labels_B[~even_B]
        most = np.bincount(labels_B[~even_B].astype(int)).max() / len(right_B)
        return "R2 of its classes", float((right_B.mean() - most) / max(1 - most, 1e-9))
    rows_K = np.bincount(ids_B[even_B], minlength=ids_B.max() + 1)
    sums_K = np.bincount(ids_B[even_B], labels_B[even_B], minlength=len(rows_K))
    mean = labels_B[even_B].mean()
    found_B = ((sums_K + mean) / (rows_K + 1))[ids_B[~even_B]]  # a row's worth of the mean for the rare
    return _fit_of(found_B, labels_B[~even_B], task)


def _told_by_number(numbers_B: Array, labels_B: Array, task: LabelTask) -> tuple[str, float]:
    if task.label.task == "multiclass" or np.ptp(numbers_B) == 0:
        return "", 0.0
    if task.label.task == "binary":
        metric, value = _fit_of(numbers_B, labels_B, task)
        return metric, max(value, 1 - value)
    return "R2", float(np.corrcoef(numbers_B, labels_B)[0, 1] ** 2)


def _fit_of(found_B: Array, labels_B: Array, task: LabelTask) -> tuple[str, float]:
    from sklearn.metrics import r2_score, roc_auc_score

    if np.ptp(labels_B) == 0:
        return "", 0.0
    if task.label.task == "binary":
        return "AUC", float(roc_auc_score(labels_B, found_B))
    return "R2", float(r2_score(labels_B, found_B))


def _spaced(rows: Dataset, most: int) -> dict[str, Tensor]:
    """Return all rows of a split, or `most` of them, evenly spaced."""
    if len(rows) <= most:
        return rows.fetch(np.arange(len(rows)))
    return rows.fetch(np.linspace(0, len(rows) - 1, most).astype(np.int64))
