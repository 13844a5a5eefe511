"""Trains a model with a table in host memory in a loop with accelerate.

python -m examples.trainers.with_accelerate
"""

from typing import Any

from accelerate import Accelerator

from dphybrid.embedding import clip_grad_norm_
from examples.trainers.clicks import MAX_NORM, NUM_EPOCHS, Clicks, make_loader, make_model, make_optimizer


# [start:loop]
def main(
    resume: str | None = None, save: str | None = None, epochs: int = NUM_EPOCHS, **options: Any
) -> tuple[list[float], Clicks]:
    """Train and return the loss of each batch, and the model. resume: folder of a checkpoint to continue;
    save: folder for a checkpoint at the end. options: of the Accelerator."""
    accelerator = Accelerator(cpu=True, **options)
    model = make_model()
    model, optimizer, schedule, batches = accelerator.prepare(model, *make_optimizer(model), make_loader())
    if resume is not None:
        accelerator.load_state(resume)
    losses: list[float] = []
    for _ in range(epochs):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    # Not accelerator.clip_grad_norm_: torch's clipping refuses sparse gradients. It would
                    # also unscale them, which has an effect only with float16.
                    accelerator.unscale_gradients()
                    clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if save is not None:
        accelerator.save_state(save)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses, model


# [end:loop]


if __name__ == "__main__":
    main()
