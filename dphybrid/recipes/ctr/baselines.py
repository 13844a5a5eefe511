"""Baselines to compare a table's model with (a constant, a linear model), and a check for columns that leak
the label.

Letters: B rows, F id columns, N numbers, C classes, K values of a column.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dphybrid.data.batches import Array, Dataset
from dphybrid.data.store import Prepared
from dphybrid.data.table.cells import FIRST_ID, MISSING_ID
from dphybrid.training.label_tasks import LabelTask, label_task
from dphybrid.training.metrics import area_under_roc

if TYPE_CHECKING:
    from scipy import sparse

_LINEAR_ROWS = 2**16
"""The linear model is fitted on at most this many evenly spaced training rows, divided by the number of its
outputs."""
LOOKED_AT = 2**18
"""Baselines are evaluated, and columns checked, on at most this many evenly spaced rows."""
_LEAK = 0.99
"""A column leaks the label if its AUC or R2 alone is above this."""
_IMPURE, _PURE_SHARE = 0.005, 0.2
"""Rows leak a class if at most this share of them is of others, and they hold this share of the class."""
_FEWEST_ROWS = 50
"""With fewer rows a column may predict the label by chance, so none is checked."""


def baselines(data: Prepared) -> dict[str, dict[str, float]]:
    """Return the metrics on the validation rows of two predictions: the most frequent class (for numbers:
    their mean), and a linear model of the same encoded rows. Computed once for prepared data."""
    return data.fact("baselines-2", lambda: _baselines(data))


def _baselines(data: Prepared) -> dict[str, dict[str, float]]:
    task = label_task(data.info)
    train = _spaced(data.dataset("train"), _LINEAR_ROWS // task.num_outputs)
    valid = _spaced(data.dataset("valid"), LOOKED_AT)
    name = "mean" if task.label.task in ("regression", "counts") else "majority class"
    return {
        name: task.compute(_constant_outputs(train, valid, task)),
        "linear model": task.compute(_outputs(_linear(train, valid, data.info, task), valid, task)),
    }


def floor(data: Prepared) -> dict[str, Tensor]:
    """Return the outputs of a model that always predicts the most frequent class, or the mean, on all
    validation rows."""
    valid = data.dataset("valid")
    train = _spaced(data.dataset("train"), LOOKED_AT)
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
    train: Mapping[str, Tensor], valid: Mapping[str, Tensor], info: Mapping[str, object], task: LabelTask
) -> Tensor:
    """Return the logits on the validation rows of scikit-learn's linear model, with its default penalty."""
    from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

    balanced = "balanced" if info.get("class_weights") else None
    rows, wanted, labels_B = _sparse(train, info), _sparse(valid, info), train["labels_B"].numpy()
    weights_B = train["weights_B"].numpy() if "weights_B" in train else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an optimizer that has not converged: close enough for a baseline
        if task.label.task in ("binary", "multiclass"):
            classes = np.unique(labels_B)
            # LogisticRegression refuses a single class, and the spaced rows may have only one.
            if len(classes) < 2:
                return _constant_outputs(train, valid, task)["logits"]
            model = LogisticRegression(max_iter=100, class_weight=balanced).fit(rows, labels_B, weights_B)
            found = torch.from_numpy(model.decision_function(wanted)).float()
            if task.num_outputs == 1:
                return found
            # scikit-learn gives one score when its rows have only two of the task's classes.
            if found.dim() == 1:
                found = torch.stack([torch.zeros_like(found), found], 1)
            # It has no columns for classes that its rows lack: those get a probability near 0.
            logits_BC = torch.full((len(found), task.num_outputs), -30.0)
            logits_BC[:, torch.from_numpy(classes).long()] = found
            return logits_BC
        if task.label.task == "counts":
            means_B = PoissonRegressor(max_iter=100).fit(rows, labels_B, weights_B).predict(wanted)
            return torch.from_numpy(np.log(np.maximum(means_B, 1e-9))).float()
        return torch.from_numpy(Ridge().fit(rows, labels_B, weights_B).predict(wanted)).float()


def _sparse(batch: Mapping[str, Tensor], info: Mapping[str, Any]) -> "sparse.csr_matrix":
    """Return the rows as a sparse matrix: one-hot columns for the ids (an item of a bag counts 1 / the bag's
    size), then the numbers."""
    from scipy import sparse  # takes a second

    starts_F = torch.tensor([0, *info["num_ids"]]).cumsum(0)
    ids_BF, width = batch["ids_BF"], int(starts_F[-1])
    ones = [ids_BF + starts_F[: ids_BF.shape[1]]]
    shares = [torch.ones(ids_BF.shape)]
    if "bags_BFL" in batch:
        bags_BFL = batch["bags_BFL"]
        # Padding (-1) becomes some column with the value 0.
        is_item_BFL = bags_BFL >= 0
        items_BFL = bags_BFL.clamp(min=0) + starts_F[ids_BF.shape[1] : -1, None]
        ones.append(items_BFL.flatten(1))
        shares.append((is_item_BFL / is_item_BFL.sum(2, keepdim=True).clamp(min=1)).flatten(1))
    columns, values = torch.cat(ones, 1), torch.cat(shares, 1)
    # Every row has equally many entries, so the rows' ends are multiples.
    ends = np.arange(len(columns) + 1) * columns.shape[1]
    entries = (values.numpy().ravel(), columns.numpy().ravel(), ends)
    one_hot = sparse.csr_matrix(entries, shape=(len(columns), width))
    return sparse.hstack([one_hot, sparse.csr_matrix(batch["dense_BN"].numpy())]).tocsr()


def leaks(data: Prepared) -> list[str]:
    """Return a warning for each column that alone predicts the label nearly perfectly (AUC or R2 above
    `_LEAK`), or of which one value, or having a value at all, goes with one class in nearly all of many rows.

    The predictor is a number itself, or the mean label of each of the column's values, fitted on every second
    row and evaluated on the others. Computed once for prepared data."""
    return data.fact("leaks-2", lambda: _leaks(data))


def _leaks(data: Prepared) -> list[str]:
    batch, task = _spaced(data.dataset("train"), LOOKED_AT), label_task(data.info)
    labels_B = batch["labels_B"].numpy().astype(np.float64)
    if len(labels_B) < _FEWEST_ROWS or np.ptp(labels_B) == 0:
        return []
    names = [str(column["name"]) for column in data.info.get("columns", [])]
    kind = {"binary": "binary", "multiclass": "multiclass"}.get(task.label.task, "continuous")
    found: dict[str, tuple[float, str]] = {}
    # strict=False: the columns after those of ids_BF are bags, which are not checked.
    for name, ids_B in zip(names, batch["ids_BF"].numpy().T, strict=False):
        # Fitted and evaluated on different rows: a column of unique values would predict its own rows.
        means_VC = _means_of_values(ids_B[::2], labels_B[::2], int(ids_B.max()) + 1, task.num_outputs)
        means_BC = means_VC[ids_B[1::2]]
        if kind == "multiclass":
            found[name] = _gain_over_majority(means_BC.argmax(1), labels_B[1::2]), "R2 of its classes"
        else:
            found[name] = _score(means_BC[:, 0], labels_B[1::2], kind)
    for name, numbers_B in zip(data.info.get("dense", []), batch["dense_BN"].numpy().T, strict=True):
        if kind != "multiclass" and np.ptp(numbers_B):
            # A column may be read both as values and as a number: the better predictor counts.
            found[name] = max(found.get(name, (0.0, "")), _score(numbers_B, labels_B, kind))
    remedy = "if it is not known at prediction time, leave it out: --data.ignore"
    warned = {
        name: f"column {name!r} alone predicts the label ({metric} {value:.4f}); {remedy} {name}"
        for name, (value, metric) in found.items()
        if value > _LEAK
    }
    if kind != "continuous":
        classes = data.info["label"]["classes"]
        for name, ids_B in zip(names, batch["ids_BF"].numpy().T, strict=False):
            if name not in warned and (what := _pure_rows(ids_B, labels_B.astype(np.int64), classes)):
                warned[name] = f"column {name!r}: {what}; {remedy} {name}"
    return list(warned.values())


def _pure_rows(ids_B: Array, labels_B: Array, classes: Sequence[str]) -> str:
    """Return which rows of a column are of one class, though they hold a good part of its rows: those with a
    value, those without, or those with one of its values. Empty if there are none."""
    counts_C = np.bincount(labels_B, minlength=len(classes))
    by_value_VC = np.bincount(
        ids_B * len(classes) + labels_B, minlength=(int(ids_B.max()) + 1) * len(classes)
    )
    by_value_VC = by_value_VC.reshape(-1, len(classes))
    missing_C = by_value_VC[MISSING_ID]
    groups = [("rows with a value", counts_C - missing_C), ("rows without a value", missing_C)]
    # Only values that hold a good part of a class, of which there are few.
    large_V: Array = np.any(by_value_VC >= _PURE_SHARE * np.maximum(counts_C, 1), axis=1)
    groups += [
        ("rows with one of its values", rows_C) for rows_C in by_value_VC[FIRST_ID:][large_V[FIRST_ID:]]
    ]
    for what, rows_C in groups:
        rows, most = int(rows_C.sum()), int(rows_C.argmax())
        if rows < _FEWEST_ROWS or rows == len(labels_B):
            continue
        share, others = counts_C[most] / len(labels_B), rows - int(rows_C[most])
        # Not by chance, nor because nearly all rows are of this class.
        surprising = rows * np.log(share) < np.log(1e-9 / len(by_value_VC))
        if surprising and others <= _IMPURE * rows and rows_C[most] >= _PURE_SHARE * counts_C[most]:
            return (
                f"{rows_C[most]:,} of {rows:,} {what} are {classes[most]!r}, "
                f"{rows_C[most] / counts_C[most]:.0%} of all rows that are"
            )
    return ""


def _means_of_values(ids_B: Array, labels_B: Array, num_values: int, num_classes: int) -> Array:
    """Return means_VC: for each value its mean label, or with several classes the share of each. The overall
    mean counts like one more row of each value, so rare values prove little (Micci-Barreca 2001)."""
    counts_V = np.bincount(ids_B, minlength=num_values)
    classes = range(num_classes) if num_classes > 1 else [None]
    wanted = [labels_B if number is None else (labels_B == number).astype(float) for number in classes]
    sums = [np.bincount(ids_B, each_B, minlength=num_values) + each_B.mean() for each_B in wanted]
    return np.stack(sums, 1) / (counts_V[:, None] + 1)


def _gain_over_majority(predicted_B: Array, labels_B: Array) -> float:
    """Return (accuracy - share of the most frequent class) / (1 - this share): 1 at most."""
    most = float(np.unique(labels_B, return_counts=True)[1].max()) / len(labels_B)
    return (float((predicted_B == labels_B).mean()) - most) / max(1 - most, 1e-9)


def _score(predictor_B: Array, labels_B: Array, kind: str) -> tuple[float, str]:
    """Return how well one number predicts the labels, in either direction, and the metric's name."""
    if kind == "continuous":
        varies = np.ptp(predictor_B) and np.ptp(labels_B)
        return (float(np.corrcoef(predictor_B, labels_B)[0, 1] ** 2) if varies else 0.0), "R2"
    value = area_under_roc(labels_B, predictor_B) if np.ptp(labels_B) else 0.5
    return max(value, 1 - value), "AUC"


def _spaced(rows: Dataset, most: int) -> dict[str, Tensor]:
    """Return the rows of a split: all of them, or `most` evenly spaced ones."""
    if len(rows) <= most:
        return rows.fetch(np.arange(len(rows)))
    return rows.fetch(np.linspace(0, len(rows) - 1, most).astype(np.int64))
