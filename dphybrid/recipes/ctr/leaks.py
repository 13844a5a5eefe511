"""A check for columns that leak the label.

Letters: B rows, F id columns, N numbers, C classes, V ids.
"""

from collections.abc import Sequence

import numpy as np

from dphybrid.data.batches import Array, evenly_spaced
from dphybrid.data.store import Prepared
from dphybrid.data.table.cells import FIRST_ID, MISSING_ID
from dphybrid.data.table.labels import Label
from dphybrid.util.roc import area_under_roc
from dphybrid.util.text import as_flags

_CHECKED = 2**16
"""Columns are checked on at most this many evenly spaced rows."""
_LEAK = 0.99
"""A column leaks the label if its AUC or R2 alone is above this."""
_IMPURE, _PURE_SHARE = 0.005, 0.2
"""Rows leak a class if at most this share of them is of others, and they hold this share of the class."""
_SCREENED, _DOUBTFUL = 2**12, 0.9
"""A column with a score below this on so many of the rows is not scored on all, as sorting takes long."""
_FEWEST_ROWS = 50
"""With fewer rows a column may predict the label by chance, so none is checked."""


def leaks(data: Prepared) -> list[str]:
    """Return a warning for each column that alone predicts the label nearly perfectly (AUC or R2 above
    `_LEAK`), or of which one value, or having a value at all, goes with one class in nearly all of many rows.

    The predictor is a number itself, or the mean label of each of the column's values, fitted on every second
    row and evaluated on the others. Computed once for prepared data."""
    return data.fact("leaks-2", lambda: _leaks(data))


def _leaks(data: Prepared) -> list[str]:
    rows, label = data.rows("train"), Label.of(data.info)
    index_B = rows.part_rows[evenly_spaced(len(rows), _CHECKED)]
    ids_BF, dense_BN, labels_B = (rows.arrays[name][index_B] for name in ("ids_BF", "dense_BN", "labels_B"))
    labels_B = labels_B.astype(np.float64)
    if len(labels_B) < _FEWEST_ROWS or np.ptp(labels_B) == 0:
        return []
    names = [str(column["name"]) for column in data.info.get("columns", [])]
    kind = {"binary": "binary", "multiclass": "multiclass"}.get(label.task, "continuous")
    num_classes = len(label.classes) if kind == "multiclass" else 1
    found: dict[str, tuple[float, str]] = {}
    # strict=False: the columns after those of ids_BF are bags, which are not checked.
    for name, ids_B in zip(names, ids_BF.T, strict=False):
        # Fitted and evaluated on different rows: a column of unique values would predict its own rows.
        means_VC = _means_of_values(ids_B[::2], labels_B[::2], int(ids_B.max()) + 1, num_classes)
        if kind == "multiclass":
            predicted_B = means_VC.argmax(1)[ids_B[1::2]]
            found[name] = _gain_over_majority(predicted_B, labels_B[1::2]), "R2 of its classes"
        else:
            found[name] = _score(means_VC[:, 0][ids_B[1::2]], labels_B[1::2], kind)
    for name, numbers_B in zip(data.info.get("dense", []), dense_BN.T, strict=True):
        if kind != "multiclass" and np.ptp(numbers_B):
            # A column may be read both as values and as a number: the better predictor counts.
            found[name] = max(found.get(name, (0.0, "")), _score(numbers_B, labels_B, kind))
    remedy = "if it is not known at prediction time, leave it out:"
    warned = {
        name: f"column {name!r} alone predicts the label ({metric} {value:.4f}); {remedy} "
        + as_flags({"data.ignore": [name]})
        for name, (value, metric) in found.items()
        if value > _LEAK
    }
    if kind != "continuous":
        classes = data.info["label"]["classes"]
        for name, ids_B in zip(names, ids_BF.T, strict=False):
            if name not in warned and (what := _pure_rows(ids_B, labels_B.astype(np.int64), classes)):
                warned[name] = f"column {name!r}: {what}; {remedy} {as_flags({'data.ignore': [name]})}"
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
    """Return how well one number predicts the labels, in either direction, and the metric's name; judged by
    some of the rows, if it is far from a leak there."""
    if (step := len(labels_B) // _SCREENED) > 1:
        few = slice(0, step * _SCREENED, step)
        common = int(np.unique(labels_B[few], return_counts=True)[1].max())
        # Of a rare class, some of the rows are too few to judge by.
        if _SCREENED - common >= _FEWEST_ROWS:
            found = _score(predictor_B[few], labels_B[few], kind)
            if found[0] < _DOUBTFUL:
                return found
    if kind == "continuous":
        varies = np.ptp(predictor_B) and np.ptp(labels_B)
        return (float(np.corrcoef(predictor_B, labels_B)[0, 1] ** 2) if varies else 0.0), "R2"
    value = area_under_roc(labels_B, predictor_B) if np.ptp(labels_B) else 0.5
    return max(value, 1 - value), "AUC"
