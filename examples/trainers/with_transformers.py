"""Trains a model with a table in host memory in the Trainer of transformers.

python -m examples.trainers.with_transformers
"""

import tempfile
from typing import Any

from transformers import Trainer, TrainingArguments

from dphybrid.embedding import clip_rows_too
from examples.trainers.clicks import BATCH_SIZE, MAX_NORM, NUM_EPOCHS, Samples, make_model, make_optimizer


# [start:trainer]
def make_trainer(folder: str, optimizers: Any = None, **options: Any) -> Trainer:
    """Return a Trainer that writes to `folder`. optimizers: optimizer and schedule; None: those of
    `make_optimizer`. options: of the TrainingArguments."""
    model = make_model()
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH_SIZE,
        **{"num_train_epochs": NUM_EPOCHS, "max_grad_norm": MAX_NORM, "save_strategy": "epoch", **options},
        train_sampling_strategy="sequential",  # the order of the plain loop, so that losses are equal
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Samples(),
        optimizers=make_optimizer(model) if optimizers is None else optimizers,
    )
    clip_rows_too(trainer)
    return trainer


# [end:trainer]


def losses_of(trainer: Trainer) -> list[float]:
    """Return the losses of all logged steps."""
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        trainer.train()
        losses = losses_of(trainer)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
