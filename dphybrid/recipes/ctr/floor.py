"""The best constant prediction, with which each result is compared.

Letters: B rows, C classes.
"""

import numpy as np
import torch
from torch import Tensor

from dphybrid.data.batches import evenly_spaced
from dphybrid.data.store import Prepared
from dphybrid.training.label_tasks import LabelTask, label_task

_MOST_ROWS = 2**18
"""The shares of classes are counted on at most this many evenly spaced training rows."""


def floor(data: Prepared) -> dict[str, Tensor]:
    """Return the outputs, on all validation rows, of a model that always predicts the shares of the classes,
    or the mean."""
    task, valid = label_task(data.info), data.dataset("valid")
    rows = valid.fetch(np.arange(len(valid)))
    constant = _constant(data, task)
    logits = constant.expand(len(valid), *constant.shape).float()
    weights_B = rows.get("weights_B", torch.ones(len(valid)))
    loss_B = task.loss(logits, rows["labels_B"]) * weights_B
    return {"logits": logits, "labels_B": rows["labels_B"], "loss": loss_B, "weight": weights_B}


def _constant(data: Prepared, task: LabelTask) -> Tensor:
    """Return the best logits that are the same for all rows."""
    if task.label.task == "regression":
        return torch.zeros(())  # encoded labels have a mean of 0
    rows = data.dataset("train")
    train = rows.fetch(evenly_spaced(len(rows), _MOST_ROWS))
    labels_B = train["labels_B"].long()
    weights_B = train.get("weights_B", torch.ones(len(labels_B))).double()
    counts_C = torch.bincount(labels_B, weights_B, minlength=max(2, task.num_outputs))
    # + 1e-3: a class that these rows lack would have the logarithm of 0.
    logits_C = (counts_C + 1e-3).log().log_softmax(0)
    return logits_C if task.num_outputs > 1 else logits_C[1] - logits_C[0]
