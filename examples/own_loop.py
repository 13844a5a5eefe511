"""Your own PyTorch loop: a table in host memory, a dense block on four virtual devices, and prefetched rows.

    python examples/own_loop.py

It uses only `dphybrid.embedding` and `dphybrid.parallel`: no config, no Prefect, no MLflow. Letters: B
samples, F ids of a sample, D width of a row.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dphybrid.embedding import HostEmbedding, RowPipeline, clip_grad_norm_, dense_parameters, row_optimizer
from dphybrid.parallel import DataParallel

NUM_ROWS, NUM_STEPS, BATCH_SIZE = 100_000, 60, 62


class Clicks(nn.Module):
    """A small network over the concatenated rows of two ids."""

    def __init__(self, devices: str) -> None:
        super().__init__()
        self.table = HostEmbedding(NUM_ROWS, 16)  # stays in host memory, whatever .to() does
        layers = nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        self.net = DataParallel(nn.Sequential(*layers), devices)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        # Like self.table(ids), but each device gets only the rows of its own samples.
        rows_BFD = self.net.rows(self.table, batch["ids_BF"])
        logits_B: Tensor = self.net(rows_BFD).squeeze(1)
        return logits_B


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield made-up samples, clicked if the first id is even."""
    # Its own generator: the pipeline asks for batches ahead of time, which would change the order of draws
    # from torch's global one.
    random = torch.Generator().manual_seed(seed)
    for _ in range(NUM_STEPS):
        ids_BF = torch.randint(0, 50, (BATCH_SIZE, 2), generator=random)
        yield {"ids_BF": ids_BF, "labels_B": (ids_BF[:, 0] % 2 == 0).float()}


def main(devices: str = "cpu*4") -> dict[str, float]:
    """Train, then print and return the first and last loss and the number of changed rows."""
    torch.manual_seed(0)
    model = Clicks(devices)
    before = model.table.weight.detach().clone()
    dense = torch.optim.Adam(dense_parameters(model), lr=0.01)
    rows = row_optimizer("adagrad", model, lr=0.1)  # updates only the rows of the batch
    losses = []
    with RowPipeline(model) as pipeline:
        for batch in pipeline.prefetch(batches(seed=1), lambda batch: {"table": batch["ids_BF"]}):
            dense.zero_grad()
            rows.zero_grad()
            loss = binary_cross_entropy_with_logits(model(batch), batch["labels_B"])
            loss.backward()
            # Not torch's function, which refuses sparse gradients; one norm for blocks and rows.
            clip_grad_norm_(model.parameters(), max_norm=1.0)
            dense.step()
            rows.step()
            losses.append(loss.item())
    split = model.net.last_split
    assert split is not None
    changed = int((model.table.weight != before).any(1).sum())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"{changed} of {NUM_ROWS:,} rows changed")
    print("\n".join(split.lines()))
    return {"first": losses[0], "last": losses[-1], "changed": changed}


if __name__ == "__main__":
    main()
