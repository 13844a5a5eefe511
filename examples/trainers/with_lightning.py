"""Trains a model with a table in host memory in Lightning's Trainer.

python -m examples.trainers.with_lightning
"""

from pathlib import Path
from typing import Any

import lightning
from torch import Tensor

from dphybrid.embedding import clip_grad_norm_
from examples.trainers.clicks import MAX_NORM, NUM_EPOCHS, make_loader, make_model, make_optimizer


# [start:module]
class LitClicks(lightning.LightningModule):
    """The model, its training step and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = make_model(), list[float]()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        self.losses.append(loss.item())
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip rows and dense parameters by their common norm; torch's clipping refuses sparse gradients."""
        clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], MAX_NORM)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = make_optimizer(self.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# [end:module]


def main(
    resume: Path | None = None, save: Path | None = None, module: LitClicks | None = None, **options: Any
) -> LitClicks:
    """Train and return the module. resume: checkpoint to continue; save: file for a checkpoint at the end.
    options: of Lightning's Trainer."""
    module = module or LitClicks()
    options = {"max_epochs": NUM_EPOCHS, "accelerator": "cpu", **options}
    trainer = lightning.Trainer(
        logger=False, enable_progress_bar=False, enable_checkpointing=False, **options
    )
    trainer.fit(module, make_loader(), ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


if __name__ == "__main__":
    losses = main().losses
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
