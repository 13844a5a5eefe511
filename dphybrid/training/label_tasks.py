"""Loss, metrics and link function for each kind of label (`dphybrid.data.table.labels`): binary, multiclass
and regression. Recipes use the loss, the training loop the metrics, predictions the link.

Letters: B samples, C classes. logits are (B,), or (B, C) for multiclass labels."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dphybrid.data.batches import evenly_spaced
from dphybrid.data.table.labels import Label
from dphybrid.training.metrics import BINARY, Task, sample_weights
from dphybrid.training.results import Chart
from dphybrid.util.errors import UserError
from dphybrid.util.roc import roc_curve

Array = np.ndarray[Any, Any]
_HALF = 0.5
"""Rows with at least this probability are of the positive class."""
_SHOWN_ROWS = 400
"""Most rows of a scatter plot."""
_SHOWN_POINTS = 200
"""Most points of a curve."""


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

    def classes(self, predicted: Array, threshold: float = _HALF) -> Array:
        """Return the classes (B,) of predictions, as texts: of two, the positive one from `threshold` on; of
        several, the most probable one."""
        names = np.array(self.label.classes, object)
        numbers_B = predicted.argmax(1) if self.label.task == "multiclass" else (predicted >= threshold) * 1
        return names[numbers_B]

    def table(self, predicted: Array) -> dict[str, object]:
        """Return predictions as columns, by the names of `Label.columns`."""
        if self.label.task != "multiclass":
            return dict.fromkeys(self.label.columns, predicted)
        # The first column has the most likely class, the others one probability for each class.
        likeliest, *probabilities = self.label.columns
        return {likeliest: self.classes(predicted), **dict(zip(probabilities, predicted.T, strict=True))}


def label_task(facts: Mapping[str, object]) -> LabelTask:
    """Return the task for prepared data. facts: what is known about it (`context.info`)."""
    label = Label.of(facts)
    return {"binary": _binary, "multiclass": _multiclass, "regression": _regression}[label.task](label)


def _binary(label: Label) -> LabelTask:
    def charts(outputs: dict[str, Tensor]) -> list[Chart]:
        logits_B, labels_B = outputs["logits"].double().numpy(), outputs["labels_B"].numpy()
        fallout_T, recall_T = roc_curve(labels_B, logits_B, sample_weights(outputs))
        shown = evenly_spaced(len(recall_T), _SHOWN_POINTS)
        axes = ("false positive rate", "true positive rate")
        return [Chart.of("roc", "ROC curve", axes, fallout_T[shown], recall_T[shown], drawn="line")]

    return LabelTask(
        **(vars(BINARY) | {"chosen_by": "log_loss", "charts": charts, "floor": _constant(label)}),
        label=label,
        loss=cross_entropy_of_two,
        link=lambda logits_B: torch.sigmoid(logits_B.float()),
    )


def _multiclass(label: Label) -> LabelTask:
    def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
        logits_BC, labels_B = outputs["logits"].double(), outputs["labels_B"].long()
        if logits_BC.shape[1:] != (len(label.classes),):
            raise UserError(
                f"the label has {len(label.classes)} classes, but the model returns logits of shape "
                f"{tuple(logits_BC.shape)}; return one logit for each class, or change data.task"
            )
        weights_B, predicted_B = sample_weights(outputs), logits_BC.argmax(1).numpy()
        losses_B = F.cross_entropy(logits_BC, labels_B, reduction="none").numpy()
        return {
            "accuracy": float(np.average(predicted_B == labels_B.numpy(), weights=weights_B)),
            "macro_f1": _macro_f1(labels_B.numpy(), predicted_B, weights_B),
            "log_loss": float(np.average(losses_B, weights=weights_B)),
        }

    return LabelTask(
        metric="accuracy",
        higher_is_better=True,
        compute=compute,
        chosen_by="log_loss",
        floor=_constant(label),
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

    def charts(outputs: dict[str, Tensor]) -> list[Chart]:
        predicted_B, observed_B = (link(outputs[name]).numpy() for name in ("logits", "labels_B"))
        shown, axes = evenly_spaced(len(predicted_B), _SHOWN_ROWS), ("predicted", "observed")
        title = "Predicted against observed"
        return [
            Chart.of("predicted_against_observed", title, axes, predicted_B[shown], observed_B[shown]),
        ]

    return LabelTask(
        metric="rmse",
        higher_is_better=False,
        compute=compute,
        charts=charts,
        floor=_constant(label),
        label=label,
        loss=lambda logits_B, labels_B: F.mse_loss(logits_B, labels_B.to(logits_B.dtype), reduction="none"),
        link=link,
    )


def _constant(label: Label) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the floor: the best constant, which is the shares of the classes or the mean of the labels."""

    def floor(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        labels_B, weights_B = outputs["labels_B"].double(), outputs["weight"].double()
        if label.task == "regression":
            best = (labels_B * weights_B).sum() / weights_B.sum()
        else:
            counts_C = torch.bincount(labels_B.long(), weights_B, minlength=max(2, len(label.classes)))
            # + 1e-3: a class that these rows lack would have the logarithm of 0.
            logits_C = (counts_C + 1e-3).log()
            best = logits_C if label.task == "multiclass" else logits_C[1] - logits_C[0]
        return outputs | {"logits": best.to(outputs["logits"].dtype).expand_as(outputs["logits"])}

    return floor


def cross_entropy_of_two(logits_B: Tensor, labels_B: Tensor) -> Tensor:
    """Return the binary cross-entropy (B,) of logits."""
    return F.binary_cross_entropy_with_logits(logits_B, labels_B.to(logits_B.dtype), reduction="none")


def _macro_f1(labels_B: Array, predicted_B: Array, weights_B: Array | None) -> float:
    """Return the mean F1 of the classes that are the label, or the prediction, of a row. Importing
    scikit-learn's takes a second, in each training."""
    classes, both_2B = np.unique(np.stack([labels_B, predicted_B]), return_inverse=True)
    labels_B, predicted_B = both_2B.reshape(2, -1)
    ones_B = np.ones(len(labels_B)) if weights_B is None else weights_B

    def weight_of(classes_B: Array, rows_B: Array) -> Array:
        return np.bincount(classes_B, ones_B * rows_B, minlength=len(classes))

    every_B = np.ones(len(labels_B))
    hits_C = weight_of(labels_B, labels_B == predicted_B)
    both_C = weight_of(labels_B, every_B) + weight_of(predicted_B, every_B)
    # Rows of weight 0 can leave a class without any.
    return float((2 * hits_C / np.maximum(both_C, 1e-300)).mean())
