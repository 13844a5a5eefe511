"""Tasks: metrics over the validation outputs, and the one that decides which checkpoint is best."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from dphybrid.util.errors import UserError


class Chart(BaseModel):
    """Points (x, y) of a figure, beside the line where both are equal, or where y is 0. name: of its file."""

    name: str
    title: str
    xlabel: str
    ylabel: str
    points: list[tuple[float, float]]
    line: Literal["equal", "zero"] = "equal"


class Confusion(BaseModel):
    """A figure of the rows of each class by the class they are taken for. name: of its file. counts: a line a
    class; of weighted rows, their weights. recall: of each class, None of one without rows."""

    name: str
    title: str
    classes: list[str]
    counts: list[list[float]]
    recall: list[float | None]


@dataclass(frozen=True)
class Task:
    """metric: the deciding metric's name. higher_is_better: its direction. compute: from all validation
    outputs to named numbers. charts: from the same to the report's figures of them. baselines:
    from the same to the metrics of simple rules, by the rule's name.

    reads: what compute needs of batches and outputs, samples on dim 0; losses and weights come along anyway.
    chosen_by: the loss among the metrics, lower is better, that chooses the best checkpoint and stops the
    training early, where few rows soon give the metric itself its highest value; "" for the metric.
    prediction: the model's output, among `reads`, whose mean over all rows is a baseline; "" for none.
    """

    metric: str
    higher_is_better: bool
    compute: Callable[[dict[str, Tensor]], dict[str, float]]
    reads: tuple[str, ...] = ()
    charts: Callable[[dict[str, Tensor]], Sequence[Chart | Confusion]] | None = None
    chosen_by: str = ""
    prediction: str = ""
    baselines: Callable[[dict[str, Tensor]], dict[str, dict[str, float]]] | None = None


def constant_prediction(outputs: dict[str, Tensor], task: Task) -> dict[str, dict[str, float]]:
    """Return the metrics of a model that predicts its own mean for every row, under their baseline's name.

    Empty where the task names no prediction, or where the deciding metric is computed from the losses, which
    a constant has none of.
    """
    if not task.prediction:
        return {}
    predicted = outputs[task.prediction]
    mean = predicted.double().mean(0).to(predicted.dtype).expand_as(predicted)
    # NaN: a metric of the losses drops out below.
    no_loss_B = torch.full_like(outputs["loss"], torch.nan)
    metrics = task.compute(outputs | {task.prediction: mean, "loss": no_loss_B})
    known = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {"constant prediction": known} if task.metric in known else {}


def sample_weights(outputs: dict[str, Tensor]) -> np.ndarray | None:
    """Return the samples' weights (B,) float64; None where all are 1."""
    weights_B = outputs.get("weight")
    return None if weights_B is None or bool((weights_B == 1).all()) else weights_B.double().numpy()


def _mean_loss(outputs: dict[str, Tensor]) -> float:
    return float(outputs["loss"].double().sum() / outputs["weight"].double().sum())


def _perplexity(outputs: dict[str, Tensor]) -> dict[str, float]:
    loss = _mean_loss(outputs)
    # exp overflows a double from 710 on.
    return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss}


def _binary(outputs: dict[str, Tensor]) -> dict[str, float]:
    from sklearn.metrics import log_loss, roc_auc_score

    labels_B, logits_B = outputs["labels_B"].numpy(), outputs["logits"].double()
    weights_B = sample_weights(outputs)
    # AUC of the logits: torch's sigmoid may differ in the last bit where logits are equal.
    if len(set(labels_B.tolist())) < 2:
        raise UserError(
            "the validation rows all have the same label, so AUC has no value; set more rows aside "
            "(data.valid_fraction)"
        )
    return {
        "auc": float(roc_auc_score(labels_B, logits_B.numpy(), sample_weight=weights_B)),
        "log_loss": float(log_loss(labels_B, torch.sigmoid(logits_B).numpy(), sample_weight=weights_B)),
    }


def _multiclass(outputs: dict[str, Tensor]) -> dict[str, float]:
    right_B = outputs["logits"].argmax(1) == outputs["labels_B"]
    return {"accuracy": float(right_B.double().mean()), "loss": _mean_loss(outputs)}


def _ranking(outputs: dict[str, Tensor]) -> dict[str, float]:
    ranks = outputs["ranks_B2"].double()
    hits = {f"hits_at_{n}": float((ranks <= n).double().mean()) for n in (1, 3, 10)}
    return {"mrr": float((1 / ranks).mean()), **hits, "loss": _mean_loss(outputs)}


LANGUAGE_MODEL = Task("perplexity", False, _perplexity)
BINARY = Task("auc", True, _binary, ("logits", "labels_B"), prediction="logits")
MULTICLASS = Task("accuracy", True, _multiclass, ("logits", "labels_B"), prediction="logits")
RANKING = Task("mrr", True, _ranking, ("ranks_B2",))
REGRESSION = Task("mse", False, lambda outputs: {"mse": _mean_loss(outputs)})
