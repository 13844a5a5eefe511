"""Callbacks: curves for TensorBoard, and a training that ends when it is good enough.

    pip install tensorboard
    dphybrid train --recipe digits --train.callbacks examples.callbacks:tensorboard
    tensorboard --logdir tensorboard

From Python: `dphybrid.train(..., callbacks=[tensorboard, good_enough(0.97)])`.
"""

from collections.abc import Callable
from pathlib import Path

from dphybrid.training.callbacks import EpochEnd

FOLDER = Path("tensorboard")


def tensorboard(epoch: EpochEnd) -> None:
    """Write loss, validation metrics and the sizes of all weights; a folder a run, so that runs compare."""
    from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

    with SummaryWriter(FOLDER / epoch.run) as writer:
        writer.add_scalar("train/loss", epoch.train_loss, epoch.step)
        for name, value in epoch.metrics.items():
            writer.add_scalar(f"valid/{name}", value, epoch.step)
        for name, weight in epoch.model.named_parameters():
            writer.add_histogram(name, weight.detach().cpu(), epoch.step)


def good_enough(least: float, metric: str = "accuracy") -> Callable[[EpochEnd], dict[str, float]]:
    """Make a callback that ends a training whose metric reaches `least`, and logs how far it is from it."""

    def look(epoch: EpochEnd) -> dict[str, float]:
        missing = least - epoch.metrics[metric]
        if missing <= 0:
            epoch.stop(f"{metric} {epoch.metrics[metric]:.4f} is good enough")
        return {"missing": missing}

    return look
