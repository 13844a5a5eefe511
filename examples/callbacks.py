"""Two callbacks: one writes curves for TensorBoard, one ends a training that is good enough.

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
    """Write the loss, the validation metrics and a histogram of each weight; one folder for each run, so that
    TensorBoard compares runs."""
    # Imported here, because it needs the package tensorboard, which dphybrid does not install.
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(FOLDER / epoch.run) as writer:
        writer.add_scalar("train/loss", epoch.train_loss, epoch.step)
        for name, value in epoch.metrics.items():
            writer.add_scalar(f"valid/{name}", value, epoch.step)
        for name, weight in epoch.model.named_parameters():
            writer.add_histogram(name, weight.detach().cpu(), epoch.step)


def good_enough(least: float, metric: str = "accuracy") -> Callable[[EpochEnd], dict[str, float]]:
    """Return a callback that ends the training once `metric` reaches `least`, and logs the difference."""

    def look(epoch: EpochEnd) -> dict[str, float]:
        missing = least - epoch.metrics[metric]
        if missing <= 0:
            epoch.stop(f"{metric} {epoch.metrics[metric]:.4f} is good enough")
        # Logged as `own/missing`.
        return {"missing": missing}

    return look
