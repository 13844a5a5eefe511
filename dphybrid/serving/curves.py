"""The figures of an evaluation, by scikit-learn. Trainings do not import it, which takes a second.

Letters: B rows, C classes.
"""

from collections.abc import Sequence

import numpy as np
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix, precision_recall_curve
from torch import Tensor

from dphybrid.data.batches import Array, evenly_spaced
from dphybrid.training.label_tasks import LabelTask
from dphybrid.training.results import Chart, Confusion

_BINS = 10
_SHOWN_POINTS = 200
_SHOWN_CLASSES = 12
"""Most classes of a confusion matrix: the most frequent ones."""


def figures(task: LabelTask, outputs: dict[str, Tensor]) -> list[Chart | Confusion]:
    """Return the figures of a model's outputs for rows with a label: those of a run's report, and for two
    classes precision and recall, calibration and the confusion matrix; for several classes calibration of
    the predicted class and the confusion matrix; for numbers the residuals."""
    shown: list[Chart | Confusion] = [*(task.charts(outputs) if task.charts else [])]
    predicted, labels_B = task.link(outputs["logits"]).numpy(), outputs["labels_B"].numpy()
    if task.label.task == "regression":
        rows = evenly_spaced(len(labels_B), _SHOWN_POINTS)
        left_B = task.link(outputs["labels_B"]).numpy() - predicted
        axes = ("predicted", "observed - predicted")
        return [*shown, Chart.of("residuals", "Residuals", axes, predicted[rows], left_B[rows], line="zero")]
    numbers_B = labels_B.astype(np.int64)
    if task.label.task == "binary":
        precision_T, recall_T, _ = precision_recall_curve(numbers_B, predicted)
        every, axes = evenly_spaced(len(recall_T), _SHOWN_POINTS), ("recall", "precision")
        curve = Chart.of(
            "precision_recall", "Precision and recall", axes, recall_T[every], precision_T[every],
            line="none", drawn="line",
        )  # fmt: skip
        axes = ("mean probability", f"share of rows that are {task.label.classes[1]}")
        return [
            *shown,
            curve,
            _calibration(predicted, numbers_B, axes),
            _confusion(task.label.classes, numbers_B, (predicted >= 0.5).astype(np.int64)),
        ]
    found_B = predicted.argmax(1)
    axes = ("mean probability of the predicted class", "share of rows predicted correctly")
    return [
        *shown,
        _calibration(predicted.max(1), (found_B == numbers_B).astype(np.int64), axes),
        _confusion(task.label.classes, numbers_B, found_B),
    ]


def _calibration(probabilities_B: Array, right_B: Array, axes: tuple[str, str]) -> Chart:
    share_T, mean_T = calibration_curve(right_B, probabilities_B, n_bins=_BINS, strategy="quantile")
    return Chart.of("calibration", "Calibration", axes, mean_T, share_T)


def _confusion(classes: Sequence[str], labels_B: Array, found_B: Array) -> Confusion:
    frequent = np.argsort(-np.bincount(labels_B, minlength=len(classes)), kind="stable")[:_SHOWN_CLASSES]
    numbers = np.sort(frequent)
    title = "Rows of each class by predicted class (shares)"
    if len(classes) > len(numbers):
        title = f"{title}; the {len(numbers)} most frequent of {len(classes)} classes"
    counts_CC = confusion_matrix(labels_B, found_B, labels=numbers)
    names = [classes[number] for number in numbers]
    return Confusion(name="confusion", title=title, classes=names, counts=counts_CC.tolist())
