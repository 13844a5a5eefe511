"""Shared by the examples of trainers: a model with a table in host memory, made-up clicks, the optimizers,
and a plain loop, whose losses each trainer reproduces.

    python -m examples.trainers.clicks

Letters: B samples, F ids of a sample.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from dphybrid.embedding import (
    CombinedOptimizer,
    HostEmbedding,
    clip_grad_norm_,
    dense_parameters,
    row_optimizer,
)
from dphybrid.parallel import DataParallel

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, MAX_NORM = 96, 16, 2, 0.1
NUM_STEPS = NUM_SAMPLES // BATCH_SIZE * NUM_EPOCHS


class Clicks(nn.Module):
    """A small network over the concatenated rows of two ids, on two virtual devices (with GPUs use "auto").
    It returns its loss, as models of transformers do."""

    def __init__(self, devices: str = "cpu*2") -> None:
        super().__init__()
        self.table = HostEmbedding(100_000, 8)
        self.net = DataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)), devices)

    def forward(self, ids_BF: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        logits_B = self.net(self.table(ids_BF).flatten(1)).squeeze(1)
        return {"loss": binary_cross_entropy_with_logits(logits_B, labels_B), "logits": logits_B}


class Samples(Dataset[dict[str, Tensor]]):
    """Made-up samples, clicked if the first id is even."""

    def __init__(self) -> None:
        self.ids_BF = torch.randint(0, 50, (NUM_SAMPLES, 2), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        ids_F = self.ids_BF[sample]
        return {"ids_BF": ids_F, "labels_B": (ids_F[0] % 2 == 0).float()}


def make_model() -> Clicks:
    """Return the model with the same initial values each time."""
    torch.manual_seed(0)
    return Clicks()


def make_loader() -> "DataLoader[dict[str, Tensor]]":
    """Return batches, each epoch in the same order."""
    return DataLoader(Samples(), BATCH_SIZE)


def make_optimizer(model: nn.Module) -> tuple[CombinedOptimizer, LambdaLR]:
    """Return one optimizer for dense parameters and rows, and a schedule that lowers both rates to 0."""
    # Trainers take one optimizer: CombinedOptimizer makes one of two.
    dense = torch.optim.AdamW(dense_parameters(model), lr=0.01)
    rows = row_optimizer("adagrad", model, lr=0.1)
    optimizer = CombinedOptimizer(dense, rows)
    return optimizer, LambdaLR(optimizer, lambda step: 1 - step / NUM_STEPS)


def main(accumulate: int = 1) -> tuple[list[float], Clicks]:
    """Train in a plain loop; return the loss of each batch, and the model. accumulate: batches per step."""
    model = make_model()
    optimizer, schedule = make_optimizer(model)
    losses: list[float] = []
    for _ in range(NUM_EPOCHS):
        for batch in make_loader():
            loss = model(**batch)["loss"]
            (loss / accumulate).backward()
            losses.append(loss.item())
            if len(losses) % accumulate == 0:
                clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses, model


if __name__ == "__main__":
    main()
