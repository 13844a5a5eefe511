"""Loss, metrics and link function for each kind of label (`dphybrid.data.table.labels`): binary, multiclass,
regression and counts. Recipes use the loss, the training loop the metrics, predictions the link.

Letters: B samples, C classes. logits are (B,), or (B, C) for multiclass labels."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dphybrid.data.table.labels import Label
from dphybrid.training.metrics import (
    BINARY,
    Task,
    best_threshold,
    f1_at,
    sample_weights,
)
from dphybrid.training.results import Chart, Confusion
from dphybrid.util.errors import UserError
from dphybrid.util.roc import counts_by_score

Array = np.ndarray[Any, Any]
HALF = 0.5
"""The threshold of a binary label, unless one is chosen."""
_BINS = 10
"""Points of a calibration figure; each stands for the same number of rows."""
_CALIBRATION = "Calibration: each point is a tenth of the rows"
_OBSERVED = "predicted_against_observed"
_SHOWN_ROWS = 400
"""Most rows of a scatter plot; they are taken at equal distances."""
_SHOWN_POINTS = 200
"""Most points of a curve."""
_SHOWN_CLASSES = 12
"""Most classes of a confusion matrix: the most frequent ones. The others share one line."""


@dataclass(frozen=True, kw_only=True)
class LabelTask(Task):
    """A task that predicts the label column of a table.

    loss: from logits and labels_B (float32, as prepared) to loss_B. link: from logits to predictions, in the
    label's own units or as probabilities.
    """

    reads: tuple[str, ...] = ("logits", "labels_B")
    label: Label
    loss: Callable[[Tensor, Tensor], Tensor]
    link: Callable[[Tensor], Tensor]

    @property
    def num_outputs(self) -> int:
        """Number of logits for each sample."""
        return len(self.label.classes) if self.label.task == "multiclass" else 1

    @property
    def nothing(self) -> Array:
        """An empty array of predictions, with the shape and type that `link` gives."""
        shape = (0, self.num_outputs) if self.label.task == "multiclass" else (0,)
        return self.link(torch.zeros(shape)).numpy()

    def classes(self, predicted: Array, threshold: float) -> Array:
        """Return the classes (B,) of predictions, as texts: of two, the positive one from `threshold` on; of
        several, the most probable one."""
        names = np.array(self.label.classes, object)
        found_B = predicted.argmax(1) if self.label.task == "multiclass" else (predicted >= threshold) * 1
        return names[found_B]

    def table(self, predicted: Array) -> dict[str, object]:
        """Return predictions as columns, by the names of `Label.columns`."""
        if self.label.task != "multiclass":
            return dict.fromkeys(self.label.columns, predicted)
        # The first column has the most likely class, the others one probability for each class.
        likeliest, *each = self.label.columns
        return {likeliest: self.classes(predicted, HALF), **dict(zip(each, predicted.T, strict=True))}


def label_task(facts: Mapping[str, object], threshold: float | Literal["best-f1"] = HALF) -> LabelTask:
    """Return the task for prepared data. facts: what is known about it (`context.info`). threshold: for a
    binary label, the probability from which on a row is of the positive class; "best-f1": the one with the
    best F1 on the rows that are measured. Other thresholds than 0.5 add metrics.

    Raises UserError for a threshold of a label that is not binary.
    """
    label = Label.of(facts)
    if threshold != HALF and label.task != "binary":
        raise UserError(
            f"model.threshold={threshold}: is for a label of two values, and {label.name!r} is {label.task}; "
            "leave it out"
        )
    task = _binary(label, threshold) if label.task == "binary" else _TASKS[label.task](label)
    weights: Any = facts.get("class_weights")
    return _weighted(task, torch.tensor(weights, dtype=torch.float64)) if weights else task


def _weighted(task: LabelTask, weights_C: Tensor) -> LabelTask:
    """Return the task with one metric more, the log loss in which classes have weights; it chooses the
    checkpoint. Several classes are then compared by macro F1, which counts each class equally, too."""

    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        labels_B = outputs["labels_B"]
        weights_B = weights_C[labels_B.long()]
        if (own_B := sample_weights(outputs)) is not None:
            weights_B = weights_B * torch.from_numpy(own_B)
        losses_B = task.loss(outputs["logits"].double(), labels_B.double())
        balanced = float((losses_B * weights_B).sum() / weights_B.sum())
        return {**task.compute(outputs), "balanced_log_loss": balanced}

    given = task.given
    return replace(
        task,
        compute=compute,
        chosen_by="balanced_log_loss",
        metric="macro_f1" if task.label.task == "multiclass" else task.metric,
        given=given and (lambda metrics: _weighted(cast(LabelTask, given(metrics)), weights_C)),
    )


def _binary(label: Label, threshold: float | Literal["best-f1"] = HALF) -> LabelTask:
    def probabilities(outputs: dict[str, Tensor]) -> Array:
        return link(outputs["logits"]).numpy()

    def chosen(outputs: dict[str, Tensor]) -> float:
        """Return the threshold, if need be of these rows."""
        if threshold != "best-f1":
            return float(threshold)
        labels_B, weights_B = outputs["labels_B"].numpy(), sample_weights(outputs)
        return best_threshold(labels_B, probabilities(outputs), weights_B)[0]

    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        metrics = BINARY.compute(outputs)
        if threshold == HALF:
            return metrics
        value, labels_B = chosen(outputs), outputs["labels_B"].numpy()
        f1 = f1_at(value, labels_B, probabilities(outputs), sample_weights(outputs))
        return {**metrics, "f1": f1, **({"threshold": value} if threshold == "best-f1" else {})}

    def charts(outputs: dict[str, Tensor]) -> list[Chart | Confusion]:
        logits_B, labels_B = outputs["logits"].double(), outputs["labels_B"].numpy().astype(np.int64)
        weights_B = sample_weights(outputs)
        shares = _binned(torch.sigmoid(logits_B).numpy(), labels_B.astype(np.float64), outputs)
        names = label.classes or ("0", "1")
        axes = ("mean probability", f"share of rows that are {names[1]}")
        return [
            *_ranked(labels_B, logits_B.numpy(), weights_B),
            _chart("calibration", _CALIBRATION, axes, shares),
            _confusion(
                names, labels_B, (probabilities(outputs) >= chosen(outputs)).astype(np.int64), weights_B
            ),
        ]

    def link(logits_B: Tensor) -> Tensor:
        return torch.sigmoid(logits_B.float())

    of_validation = (lambda metrics: _binary(label, metrics["threshold"])) if threshold == "best-f1" else None
    own = {"prediction": "", "chosen_by": "log_loss", "compute": compute, "charts": charts}
    return LabelTask(
        # A table's baselines are computed by its recipe.
        **(vars(BINARY) | own | {"given": of_validation}),
        label=label,
        loss=cross_entropy_of_two,
        link=link,
    )


def _multiclass(label: Label) -> LabelTask:
    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        logits_BC, labels_B = outputs["logits"].double(), outputs["labels_B"].long()
        if logits_BC.shape[1:] != (len(label.classes),):
            raise UserError(
                f"the label has {len(label.classes)} classes, but the model returns logits of shape "
                f"{tuple(logits_BC.shape)}; return one logit for each class, or change data.task"
            )
        weights_B, found_B = sample_weights(outputs), logits_BC.argmax(1).numpy()
        losses_B = F.cross_entropy(logits_BC, labels_B, reduction="none").numpy()
        return {
            "accuracy": float(np.average(found_B == labels_B.numpy(), weights=weights_B)),
            "macro_f1": _macro_f1(labels_B.numpy(), found_B, weights_B),
            "log_loss": float(np.average(losses_B, weights=weights_B)),
        }

    def charts(outputs: dict[str, Tensor]) -> list[Chart | Confusion]:
        probabilities_BC, labels_B = torch.softmax(outputs["logits"].double(), 1), outputs["labels_B"].long()
        highest_B, found_B = probabilities_BC.max(1)
        right_B = (found_B == labels_B).double().numpy()
        shares = _binned(highest_B.numpy(), right_B, outputs)
        axes = ("mean probability of the predicted class", "share of rows predicted correctly")
        return [
            _confusion(label.classes, labels_B.numpy(), found_B.numpy(), sample_weights(outputs)),
            _chart("calibration", _CALIBRATION, axes, shares),
        ]

    return LabelTask(
        metric="accuracy",
        higher_is_better=True,
        compute=compute,
        charts=charts,
        chosen_by="log_loss",
        label=label,
        loss=lambda logits_BC, labels_B: F.cross_entropy(logits_BC, labels_B.long(), reduction="none"),
        link=lambda logits_BC: torch.softmax(logits_BC.float(), dim=1),
    )


def _regression(label: Label) -> LabelTask:
    def link(logits_B: Tensor) -> Tensor:
        # In float64: next to a large offset, float32 has too few digits for the scaled logit.
        return label.offset + label.scale * logits_B.double()

    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        observed_B, predicted_B = (link(outputs[name]).numpy() for name in ("labels_B", "logits"))
        weights_B, errors_B = sample_weights(outputs), observed_B - predicted_B
        squared = float(np.average(errors_B**2, weights=weights_B))
        mean = np.average(observed_B, weights=weights_B)
        variance = float(np.average((observed_B - mean) ** 2, weights=weights_B))
        return {
            "rmse": math.sqrt(squared),
            "mae": float(np.average(np.abs(errors_B), weights=weights_B)),
            # Of equal observations: 1 if they are predicted exactly, else 0.
            "r2": 1 - squared / variance if variance else float(squared == 0),
        }

    def charts(outputs: dict[str, Tensor]) -> list[Chart | Confusion]:
        predicted_B, observed_B = link(outputs["logits"]).numpy(), link(outputs["labels_B"]).numpy()
        every = slice(None, None, -(-len(predicted_B) // _SHOWN_ROWS))  # the step, rounded up

        def shown(values_B: Array) -> list[tuple[float, float]]:
            return list(zip(predicted_B[every].tolist(), values_B[every].tolist(), strict=True))

        title, left = "Predicted against observed", "Residuals"
        rest = _chart(
            "residuals", left, ("predicted", "observed - predicted"), shown(observed_B - predicted_B)
        )
        return [
            _chart(_OBSERVED, title, ("predicted", "observed"), shown(observed_B)),
            rest.model_copy(update={"line": "zero"}),
        ]

    return LabelTask(
        metric="rmse",
        higher_is_better=False,
        compute=compute,
        charts=charts,
        label=label,
        loss=lambda logits_B, labels_B: F.mse_loss(logits_B, labels_B.to(logits_B.dtype), reduction="none"),
        link=link,
    )


def _counts(label: Label) -> LabelTask:
    def link(logits_B: Tensor) -> Tensor:
        return label.scale * torch.exp(logits_B.double())

    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        weights_B, counts_B = sample_weights(outputs), label.scale * outputs["labels_B"].double()
        # `_poisson` is half the deviance of counts that were divided by the scale, the mean count.
        deviances_B = 2 * label.scale * _poisson(outputs["logits"].double(), counts_B / label.scale)
        errors_B = (link(outputs["logits"]) - counts_B).abs().numpy()
        return {
            "poisson_deviance": float(np.average(deviances_B.numpy(), weights=weights_B)),
            "mae": float(np.average(errors_B, weights=weights_B)),
        }

    def charts(outputs: dict[str, Tensor]) -> list[Chart | Confusion]:
        predicted_B = link(outputs["logits"]).numpy()
        counts_B = label.scale * outputs["labels_B"].double().numpy()
        means = _binned(predicted_B, counts_B, outputs)
        spread = _binned(predicted_B, (counts_B - predicted_B) ** 2, outputs)
        title = "Predicted against observed: each point is a tenth of the rows"
        wide = "Spread of the counts: on the line for a Poisson distribution, above it if wider"
        return [
            _chart(_OBSERVED, title, ("mean prediction", "mean count"), means),
            _chart("spread", wide, ("mean prediction", "mean squared error"), spread),
        ]

    return LabelTask(
        metric="poisson_deviance",
        higher_is_better=False,
        compute=compute,
        charts=charts,
        label=label,
        loss=_poisson,
        link=link,
    )


_TASKS: dict[str, Callable[[Label], LabelTask]] = {
    "multiclass": _multiclass,
    "regression": _regression,
    "counts": _counts,
}


def cross_entropy_of_two(logits_B: Tensor, labels_B: Tensor) -> Tensor:
    """Return the binary cross-entropy (B,) of logits."""
    return F.binary_cross_entropy_with_logits(logits_B, labels_B.to(logits_B.dtype), reduction="none")


def _poisson(logits_B: Tensor, labels_B: Tensor) -> Tensor:
    """Return half the Poisson deviance of counts that were divided by their mean: the negative
    log-likelihood up to a term that does not depend on the model."""
    labels_B = labels_B.to(logits_B.dtype)
    # xlogy, as its value at 0 is 0 where `0 * log(0)` would be NaN.
    return torch.exp(logits_B) - labels_B * logits_B + torch.xlogy(labels_B, labels_B) - labels_B


def _macro_f1(labels_B: Array, found_B: Array, weights_B: Array | None) -> float:
    """Return the mean F1 of the classes that are the label, or the prediction, of a row."""
    classes, both_2B = np.unique(np.stack([labels_B, found_B]), return_inverse=True)
    ones_B = np.ones(len(labels_B)) if weights_B is None else weights_B
    labels_B, found_B = both_2B.reshape(2, -1)
    is_C, said_C, hit_C = (
        np.bincount(each_B, weights, minlength=len(classes))
        for each_B, weights in (
            (labels_B, ones_B),
            (found_B, ones_B),
            (labels_B, ones_B * (labels_B == found_B)),
        )
    )
    # Rows of weight 0 can leave a class without any.
    return float((2 * hit_C / np.maximum(is_C + said_C, 1e-300)).mean())


def _ranked(labels_B: Array, scores_B: Array, weights_B: Array | None) -> list[Chart]:
    """Return the ROC curve and the precision-recall curve of scores: a point for each distinct score, from
    the highest to the lowest."""
    positive_V, negative_V = counts_by_score(labels_B, scores_B, weights_B)
    counts = (each_V[positive_V + negative_V > 0] for each_V in (positive_V, negative_V))
    true_T, false_T = (np.cumsum(each_V[::-1]) for each_V in counts)
    recall_T, fallout_T, precision_T = true_T / true_T[-1], false_T / false_T[-1], true_T / (true_T + false_T)
    rates = ("false positive rate", "true positive rate")
    curve = _thinned(np.append(0.0, fallout_T), np.append(0.0, recall_T))
    roc = _chart("roc", "ROC curve", rates, curve)
    axes = ("recall", "precision")
    # Without any row, precision is 1 by convention.
    curve = _thinned(np.append(recall_T[::-1], 0.0), np.append(precision_T[::-1], 1.0))
    both = _chart("precision_recall", "Precision and recall", axes, curve)
    return [
        roc.model_copy(update={"drawn": "line"}),
        both.model_copy(update={"drawn": "line", "line": "none"}),
    ]


def _thinned(x_T: Array, y_T: Array) -> list[tuple[float, float]]:
    """Return at most `_SHOWN_POINTS` points of a curve, at equal distances along it; both ends are kept."""
    points = np.unique(np.linspace(0, len(x_T) - 1, _SHOWN_POINTS).round().astype(np.int64))
    return list(zip(x_T[points].tolist(), y_T[points].tolist(), strict=True))


def _chart(name: str, title: str, axes: tuple[str, str], points: list[tuple[float, float]]) -> Chart:
    return Chart(name=name, title=title, xlabel=axes[0], ylabel=axes[1], points=points)


def _confusion(classes: Sequence[str], labels_B: Array, found_B: Array, weights_B: Array | None) -> Confusion:
    """Return the confusion matrix: of the most frequent classes, with all others as one class."""
    counts_CC = np.zeros((len(classes), len(classes)))
    # add.at, because `+=` would count a repeated pair of classes only once.
    np.add.at(counts_CC, (labels_B, found_B), 1.0 if weights_B is None else weights_B)
    of_class_C, right_C = counts_CC.sum(1), counts_CC.diagonal()
    names = list(classes)
    recall_C = [right / rows if rows else None for right, rows in zip(right_C, of_class_C, strict=True)]
    if len(classes) > _SHOWN_CLASSES:
        # Recall of the others: rows whose exact class was found, not merely one of the others.
        order = np.argsort(-of_class_C, kind="stable")
        own, others = np.sort(order[:_SHOWN_CLASSES]), order[_SHOWN_CLASSES:]
        group_C = np.full(len(classes), _SHOWN_CLASSES)
        group_C[own] = np.arange(_SHOWN_CLASSES)
        grouped = np.zeros((_SHOWN_CLASSES + 1, _SHOWN_CLASSES + 1))
        np.add.at(grouped, (group_C[:, None], group_C[None, :]), counts_CC)
        of_others = of_class_C[others].sum()
        recall_C = [*(recall_C[c] for c in own), right_C[others].sum() / of_others if of_others else None]
        counts_CC, names = grouped, [*(names[c] for c in own), f"{len(others)} others"]
    return Confusion(
        name="confusion",
        title="Rows of each class by predicted class (shares)",
        classes=names,
        counts=counts_CC.tolist(),
        recall=recall_C,
    )


def _binned(predicted_B: Array, observed_B: Array, outputs: dict[str, Tensor]) -> list[tuple[float, float]]:
    """Sort rows by prediction, split them into `_BINS` parts of equal size, and return for each part the
    weighted means of prediction and observation."""
    weights_B = outputs["weight"].double().numpy() if "weight" in outputs else np.ones(len(predicted_B))
    # stable: rows with equal predictions must fall into the same part each time.
    parts = np.array_split(np.argsort(predicted_B, kind="stable"), min(_BINS, len(predicted_B)))

    def means(values_B: Array) -> list[float]:
        return [float(np.average(values_B[rows], weights=weights_B[rows])) for rows in parts]

    return list(zip(means(predicted_B), means(observed_B), strict=True))
