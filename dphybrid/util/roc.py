"""The ROC curve of two classes and the area under it. Needs no torch."""

import math

import numpy as np


def area_under_roc(labels_B: np.ndarray, scores_B: np.ndarray, weights_B: np.ndarray | None = None) -> float:
    """Return the area under the ROC curve: the probability that a row with label 1 has a higher score than
    one with label 0; equal scores count half. NaN if a score is not finite or a label is missing among the
    rows.

    The sum over distinct scores of Mann and Whitney (1947). scikit-learn's roc_auc_score gives the same
    value, but importing it takes two seconds of CPU time, in each training.
    """
    if not np.isfinite(scores_B).all():
        return math.nan
    positive_V, negative_V = _counts_by_score(labels_B, scores_B, weights_B)
    pairs = positive_V.sum() * negative_V.sum()
    below_V = np.cumsum(negative_V) - negative_V / 2
    return float((positive_V * below_V).sum() / pairs) if pairs else math.nan


def roc_curve(
    labels_B: np.ndarray, scores_B: np.ndarray, weights_B: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the false and the true positive rates (T,) of the ROC curve: 0, then those of the rows with at
    least each distinct score, from the highest to the lowest."""
    counts = np.stack(_counts_by_score(labels_B, scores_B, weights_B))
    counts = counts[:, counts.sum(0) > 0]  # without scores whose rows all have weight 0
    true_T, false_T = (np.append(0.0, np.cumsum(counts_V[::-1])) for counts_V in counts)
    return false_T / false_T[-1], true_T / true_T[-1]


def _counts_by_score(
    labels_B: np.ndarray, scores_B: np.ndarray, weights_B: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each distinct score, in ascending order, the weights of its rows with label 1, and of the
    others."""
    _, rank_B = np.unique(scores_B, return_inverse=True)
    ones_B = np.ones(len(scores_B)) if weights_B is None else weights_B
    positive_V = np.bincount(rank_B, ones_B * (labels_B > 0))
    return positive_V, np.bincount(rank_B, ones_B * (labels_B <= 0), minlength=len(positive_V))
