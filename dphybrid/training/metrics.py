"""Tasks: the metrics of a recipe's validation outputs, and which of them decides on the best checkpoint."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dphybrid.training.results import Chart
from dphybrid.util.errors import UserError
from dphybrid.util.roc import area_under_roc


@dataclass(frozen=True)
class Task:
    """What a recipe is evaluated by.

    Attributes:
        metric: Name of the deciding metric.
        higher_is_better: Its direction.
        compute: From all validation outputs to metrics by name.
        reads: The entries of batches and outputs that `compute` needs besides loss and weight, samples on dim
            0.
        charts: From the same outputs to figures for the report of a run.
        chosen_by: A loss among the metrics (lower is better) that decides on the best checkpoint and on early
            stopping instead of `metric`, for metrics that reach their maximum early on few rows; "" for
            `metric` itself.
        floor: From the same outputs to those of the simplest rule, such as `mean_of`. Its metrics stand
            beside each result, and retraining does not promote a first model that is not better.
        floor_name: What that rule is called there.
    """

    metric: str
    higher_is_better: bool
    compute: Callable[[dict[str, Tensor]], dict[str, float]]
    reads: tuple[str, ...] = ()
    charts: Callable[[dict[str, Tensor]], Sequence[Chart]] | None = None
    chosen_by: str = ""
    floor: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    floor_name: str = "constant prediction"


def mean_of(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a floor: the mean of this output, the model's prediction, for every row."""

    def floor(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        predicted = outputs[name]
        return outputs | {name: predicted.double().mean(0).to(predicted.dtype).expand_as(predicted)}

    return floor


def floor_metrics(task: Task, outputs: dict[str, Tensor]) -> dict[str, float]:
    """Return the metrics of a task's floor; none of those that are computed from losses, as a floor has none.
    Empty without a floor, and if the deciding metric is one of them."""
    if task.floor is None:
        return {}
    # NaN losses make every metric computed from them NaN.
    no_loss_B = torch.full_like(outputs["loss"], torch.nan)
    metrics = task.compute(task.floor(outputs) | {"loss": no_loss_B})
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return finite if task.metric in finite else {}


def sample_weights(outputs: dict[str, Tensor]) -> np.ndarray | None:
    """Return the sample weights (B,) in float64, or None if all are 1."""
    weights_B = outputs.get("weight")
    return None if weights_B is None or bool((weights_B == 1).all()) else weights_B.double().numpy()


def _mean_loss(outputs: dict[str, Tensor]) -> float:
    return float(outputs["loss"].double().sum() / outputs["weight"].double().sum())


def _perplexity(outputs: dict[str, Tensor]) -> dict[str, float]:
    loss = _mean_loss(outputs)
    # math.exp raises OverflowError from 710 on.
    return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss}


def _bits_per_byte(outputs: dict[str, Tensor]) -> dict[str, float]:
    bits = float(outputs["loss"].double().sum()) / math.log(2)
    # At least 1: a part may consist of ends of documents alone.
    return {"bits_per_byte": bits / max(1, int(outputs["bytes_B"].sum()))} | _perplexity(outputs)


def _binary(outputs: dict[str, Tensor]) -> dict[str, float]:
    labels_B, logits_B = outputs["labels_B"].numpy(), outputs["logits"].double()
    weights_B = sample_weights(outputs)
    if len(set(labels_B.tolist())) < 2:
        raise UserError(
            "the validation rows all have the same label, so AUC is undefined; raise data.valid_fraction"
        )
    losses_B = binary_cross_entropy_with_logits(logits_B, outputs["labels_B"].double(), reduction="none")
    return {
        # AUC of logits, not probabilities: torch's sigmoid may differ in the last bit for equal logits.
        "auc": area_under_roc(labels_B, logits_B.numpy(), weights_B),
        # Of logits, too: a probability that rounds to 0 or 1 has no loss, and sklearn takes 36 for it.
        "log_loss": float(np.average(losses_B.numpy(), weights=weights_B)),
    }


def _multiclass(outputs: dict[str, Tensor]) -> dict[str, float]:
    weight_B = outputs["weight"].double()
    right_B = outputs["logits"].argmax(1) == outputs["labels_B"]
    return {"accuracy": float(weight_B[right_B].sum() / weight_B.sum()), "loss": _mean_loss(outputs)}


def _ranking(outputs: dict[str, Tensor]) -> dict[str, float]:
    ranks = outputs["ranks_B2"].double()
    hits = {f"hits_at_{n}": float((ranks <= n).double().mean()) for n in (1, 3, 10)}
    return {"mrr": float((1 / ranks).mean()), **hits, "loss": _mean_loss(outputs)}


LANGUAGE_MODEL = Task("perplexity", False, _perplexity)
BYTE_LANGUAGE_MODEL = Task("bits_per_byte", False, _bits_per_byte, ("bytes_B",))
BINARY = Task("auc", True, _binary, ("logits", "labels_B"), floor=mean_of("logits"))
MULTICLASS = Task("accuracy", True, _multiclass, ("logits", "labels_B"), floor=mean_of("logits"))
RANKING = Task("mrr", True, _ranking, ("ranks_B2",))
REGRESSION = Task("mse", False, lambda outputs: {"mse": _mean_loss(outputs)})
