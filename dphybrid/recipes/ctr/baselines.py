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
        # A class that these rows lack has a logarithm, too.
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
            # scikit-learn leaves out classes that its rows lack; they get as good as no chance.
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
    a number itself, or of the mean labels of a column's values, fitted on one half of the rows and asked
    about the other."""
    from sklearn.preprocessing import TargetEncoder

    batch, task = _spaced(data.dataset("train"), LOOKED_AT), label_task(data.info)
    labels_B = batch["labels_B"].numpy().astype(np.float64)
    if len(labels_B) < _FEWEST_ROWS or np.ptp(labels_B) == 0:
        return []
    names = [str(column["name"]) for column in data.info.get("columns", [])]
    kind = {"binary": "binary", "multiclass": "multiclass"}.get(task.label.task, "continuous")
    encoder: Any = TargetEncoder(target_type=kind, smooth=1.0)  # a row's worth of the mean, for the rare
    found: dict[str, tuple[float, str]] = {}
    for name, ids_B in zip(names, batch["ids_BF"].numpy().T, strict=False):  # those after them are bags
        encoder.fit(ids_B[::2, None], labels_B[::2])
        means_BC = encoder.transform(ids_B[1::2, None])
        if kind == "multiclass":
            found[name] = _gain_of(encoder.classes_[means_BC.argmax(1)], labels_B[1::2]), "R2 of its classes"
        else:
            found[name] = _fit_of(means_BC[:, 0], labels_B[1::2], kind)
    for name, numbers_B in zip(data.info.get("dense", []), batch["dense_BN"].numpy().T, strict=True):
        if kind != "multiclass" and np.ptp(numbers_B):
            found[name] = max(found.get(name, (0.0, "")), _fit_of(numbers_B, labels_B, kind))
    return [
        f"column {name!r} alone predicts the label ({metric} {value:.4f}); if it is not known before the "
        f"answer is, leave it out: --data.ignore {name}"
        for name, (value, metric) in found.items()
        if value > _LEAK
    ]


def _gain_of(found_B: Array, labels_B: Array) -> float:
    """Return how far the share of right classes goes beyond that of the most frequent one, up to 1."""
    most = float(np.unique(labels_B, return_counts=True)[1].max()) / len(labels_B)
    return (float((found_B == labels_B).mean()) - most) / max(1 - most, 1e-9)


def _fit_of(found_B: Array, labels_B: Array, kind: str) -> tuple[float, str]:
    from sklearn.metrics import roc_auc_score

    if kind == "continuous":
        varies = np.ptp(found_B) and np.ptp(labels_B)
        return (float(np.corrcoef(found_B, labels_B)[0, 1] ** 2) if varies else 0.0), "R2"
    value = float(roc_auc_score(labels_B, found_B)) if np.ptp(labels_B) else 0.5
    return max(value, 1 - value), "AUC"


def _spaced(rows: Dataset, most: int) -> dict[str, Tensor]:
    """Return all rows of a split, or `most` of them, evenly spaced."""
    if len(rows) <= most:
        return rows.fetch(np.arange(len(rows)))
    return rows.fetch(np.linspace(0, len(rows) - 1, most).astype(np.int64))
