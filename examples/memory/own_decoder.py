"""A small decoder with a memory of hashed n-grams in host memory, and its own training loop.

    python -m examples.memory.own_decoder

It learns the text of Python's language reference, byte by byte; DPHYBRID_DEVICES='cpu*2' splits its batches
over two virtual devices. Letters: B samples, T tokens, C width of the hidden state.
"""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import (
    NgramMemory,
    RowPipeline,
    clip_grad_norm_,
    dense_parameters,
    find_tables,
    row_optimizer,
)
from dphybrid.parallel import DataParallel

WIDTH, HEADS, STEPS, BATCH_SIZE, WINDOW = 64, 4, 200, 16, 128


class Layer(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        parts = self.attend(self.norms[0](hidden_BTC)).unflatten(-1, (3, HEADS, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BTC = hidden_BTC + self.leave(found.transpose(1, 2).flatten(2))
        out: Tensor = hidden_BTC + self.wide(self.norms[1](hidden_BTC))
        return out


# [start:decoder]
class Decoder(nn.Module):
    """Predicts the next byte; each sample's loss is its mean over the window."""

    def __init__(self, memory: bool) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(WINDOW, WIDTH)
        # 400,000 rows of 32 values: 51 MB. The same line takes 400 million rows.
        self.memory = NgramMemory(WIDTH, rows=400_000, orders=(3, 5), seed=0) if memory else None
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, tokens_BT: Tensor, next_BT: Tensor) -> Tensor:
        hidden_BTC = self.bytes(tokens_BT) + self.places.weight[: tokens_BT.shape[1]]
        if self.memory is not None:
            hidden_BTC = hidden_BTC + self.memory(hidden_BTC, tokens_BT)
        for layer in self.layers:
            hidden_BTC = layer(hidden_BTC)
        scores_BTV = self.out(hidden_BTC)
        return F.cross_entropy(scores_BTV.transpose(1, 2), next_BT, reduction="none").mean(1)


# [end:decoder]


def batches(text: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return (tokens, next tokens) of random windows."""
    starts = torch.randint(
        len(text) - WINDOW - 1, (steps, BATCH_SIZE, 1), generator=torch.Generator().manual_seed(1)
    )
    windows = text[starts + torch.arange(WINDOW + 1)]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def train(memory: bool, steps: int = STEPS, devices: str | None = None) -> list[float]:
    """Train; return the loss of each step, in bits per byte."""
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    model = DataParallel(Decoder(memory), devices)
    dense = torch.optim.AdamW(dense_parameters(model), lr=0.003)
    rows = row_optimizer("adam", model, lr=0.003) if memory else None
    losses: list[float] = []

    def row_ids(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {name: model.module.memory.row_ids(batch[0]) for name in find_tables(model)}

    # The rows follow from the tokens alone, so a worker fetches those of the next batch during this step.
    with RowPipeline(model) as pipeline:
        for tokens_BT, next_BT in pipeline.prefetch(batches(text, steps), row_ids):
            loss = model(tokens_BT, next_BT).mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in (dense, rows):
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item() / 0.6931)
    return losses


def main(steps: int = STEPS) -> dict[str, float]:
    """Train with and without the memory; return the mean loss of the last tenth of the steps."""
    means = {}
    for memory in (False, True):
        last = train(memory, steps)[-max(1, steps // 10) :]
        means["memory" if memory else "plain"] = sum(last) / len(last)
    print(", ".join(f"{name}: {value:.3f} bits per byte" for name, value in means.items()))
    return means


if __name__ == "__main__":
    main()
