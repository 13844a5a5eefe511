"""The metrics over the validation split."""

from torch import Tensor

from dphybrid.recipes import Task


def compute(outputs: dict[str, Tensor]) -> dict[str, float]:
    """Return the metrics by name."""
    error_B = (outputs["predicted"] - outputs["rating_B"]).double()
    return {"mae": float(error_B.abs().mean()), "rmse": float(error_B.square().mean().sqrt())}


TASK = Task(
    "mae", higher_is_better=False, compute=compute, reads=("predicted", "rating_B"), prediction="predicted"
)
"""The metric that decides, and what its computing reads of batches and outputs."""
