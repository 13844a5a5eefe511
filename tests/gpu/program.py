"""A training as a user's script: a table of words, a recurrent and an attention layer as the region, dropout,
clipping. Prints digests of the final weights and states.

    python -m tests.gpu.program --devices cuda:0 --steps 40 [--stop-after 17 --state FILE]

Needs torch and dphybrid's embedding and parallel parts. Letters: B samples, T words per sample, D width.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from dphybrid.embedding import (
    CombinedOptimizer,
    HostEmbedding,
    RowPipeline,
    clip_grad_norm_,
    dense_parameters,
    row_optimizer,
)
from dphybrid.parallel import DataParallel, before_cuda_starts

WORDS, DIM, BATCH, LENGTH = 2000, 32, 30, 12


class Layers(nn.Module):
    """Two layers with torch's dropout between them, whose generators a saved state can contain."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(DIM, DIM, batch_first=True)
        self.attending = nn.TransformerEncoderLayer(DIM, 4, 64, 0.2, batch_first=True)
        self.dropout, self.out = nn.Dropout(0.2), nn.Linear(DIM, 1)

    def forward(self, rows_BTD: Tensor) -> Tensor:
        hidden_BTD, _ = self.recurrent(self.dropout(rows_BTD))
        scores_B: Tensor = self.out(self.attending(self.dropout(hidden_BTD)).mean(1)).squeeze(1)
        return scores_B


class Sentences(nn.Module):
    def __init__(self, devices: str) -> None:
        super().__init__()
        self.words = HostEmbedding(WORDS, DIM, seed=0)
        self.region = DataParallel(Layers(), devices)

    def forward(self, ids_BT: Tensor) -> Tensor:
        scores_B: Tensor = self.region(self.region.rows(self.words, ids_BT))
        return scores_B


def batches(first: int, steps: int) -> Iterator[Tensor]:
    for step in range(first, steps):
        draw = torch.Generator().manual_seed(step)
        chance_BT = torch.rand(BATCH - step % 3, LENGTH, generator=draw, dtype=torch.float64)
        yield ((WORDS**-0.05 * chance_BT + 1 - chance_BT) ** -20).long().clamp_(1, WORDS) - 1


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def learned(model: nn.Module, ids_BT: Tensor) -> float:
    """Compute the gradients of a batch and return its loss."""
    scores_B = model(ids_BT)
    loss = (scores_B - (ids_BT[:, 0] % 2).to(scores_B)).square().sum() / len(ids_BT)
    loss.backward()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", required=True)
    parser.add_argument("--mode", default="exact", choices=["exact", "off"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    before_cuda_starts()
    torch.manual_seed(0)
    model = Sentences(options.devices)
    dense = torch.optim.Adam(dense_parameters(model), lr=0.01)
    rows = row_optimizer("adagrad", model, lr=0.05)
    optimizer = CombinedOptimizer(dense, rows)
    stateful: dict[str, nn.Module | torch.optim.Optimizer] = {"model": model, "optimizer": optimizer}
    on_gpu = model.region.devices.home.type == "cuda"
    first = 0
    if options.state and options.state.exists():
        saved = torch.load(options.state)
        for name, each in stateful.items():
            each.load_state_dict(saved[name])
        first = saved["step"]
        torch.set_rng_state(saved["random"])
        if on_gpu:
            torch.cuda.set_rng_state_all(saved["cuda"])
    losses = []
    with RowPipeline(model, mode=options.mode, on_cpu=True) as pipeline:
        source = batches(first, options.stop_after or options.steps)
        for ids_BT in pipeline.prefetch(source, lambda ids: {"words": ids}):
            optimizer.zero_grad()
            losses.append(learned(model, ids_BT))
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        counters = pipeline.counters()
    if options.state and options.stop_after:
        state = {name: each.state_dict() for name, each in stateful.items()}
        state |= {"step": options.stop_after, "random": torch.get_rng_state()}
        torch.save(state | ({"cuda": torch.cuda.get_rng_state_all()} if on_gpu else {}), options.state)
    told = {"table": digest([model.words.weight, *rows.states().values()]), "loss": losses[-1]}
    told |= {"dense": digest(list(dense_parameters(model)))}
    print(json.dumps(told | {"prepared_ratio": counters["prepared_ratio"]}))


if __name__ == "__main__":
    main()
