"""Rows trained over a frozen, published table: a small decoder learns source code after English.

    python -m examples.memory.row_adapter

It first makes what others publish: a decoder of bytes with a table of hashed trigrams, stored as FP8 in four
pieces with one scale. Then it maps that table, trains the rows that a new text looks up, saves them, and
merges them into a copy of the checkpoint. Letters: B samples, T tokens, C width of the hidden state.
"""

import argparse
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import (
    clip_grad_norm_,
    dense_parameters,
    find_tables,
    host_tables,
    merge_rows,
    row_optimizer,
    save_rows,
)
from examples.memory.own_decoder import WIDTH, WINDOW, Layer, batches

ROWS, STEPS, PIECES = 200_000, 60, 4


class Decoder(nn.Module):
    """Predicts the next byte; each sample's loss is its mean over the window."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.trigrams = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, tokens_BT: Tensor, next_BT: Tensor) -> Tensor:
        before_BT, first_BT = F.pad(tokens_BT, (1, 0))[:, :-1], F.pad(tokens_BT, (2, 0))[:, :-2]
        ids_BT = ((first_BT * 257 + before_BT) * 257 + tokens_BT) * 2_654_435_761 % ROWS
        hidden_BTC = self.bytes(tokens_BT) + self.places.weight[: tokens_BT.shape[1]] + self.trigrams(ids_BT)
        for layer in self.layers:
            hidden_BTC = layer(hidden_BTC)
        return F.cross_entropy(self.out(hidden_BTC).transpose(1, 2), next_BT, reduction="none").mean(1)


def train(model: nn.Module, text: Tensor, steps: int) -> None:
    """Train the rows, and the dense weights that are not frozen."""
    dense = [parameter for parameter in dense_parameters(model) if parameter.requires_grad]
    optimizers = [
        row_optimizer("adam", model, lr=0.01),
        *([torch.optim.AdamW(dense, 0.003)] if dense else []),
    ]
    for tokens_BT, next_BT in batches(text, steps):
        model(tokens_BT, next_BT).mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def bits(model: nn.Module, text: Tensor) -> float:
    """Return the mean bits per byte of some windows."""
    losses = torch.cat([model(tokens_BT, next_BT) for tokens_BT, next_BT in batches(text, 4)])
    return losses.mean().item() / 0.6931


def publish(model: Decoder, folder: Path) -> None:
    """Write the model as others publish theirs: the table in FP8 and pieces, all else in a file."""
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    rows = tensors.pop("trigrams.weight")
    scale = rows.abs().max() / 224  # half of what FP8 holds, so that rows may grow
    files = {"rest.safetensors": {**tensors, "trigrams.weight_scale": scale}}
    for number, piece in enumerate((rows / scale).to(torch.float8_e4m3fn).chunk(PIECES)):
        files[f"rows-{number}.safetensors"] = {f"trigrams.shard_{number}.weight": piece.clone()}
    for file, content in files.items():
        save_file(content, folder / file)


# [start:open]
def opened(folder: Path, train: str | None) -> nn.Module:
    """Return the published model with its table mapped from the files."""
    with torch.device("meta"):
        model = Decoder()
    host_tables(model, 1e6, mapped=folder, train=train)
    model.load_state_dict(load_file(folder / "rest.safetensors"), assign=True, strict=False)
    return model


# [end:open]


def main(steps: int = STEPS, freeze: bool = True) -> dict[str, float]:
    """Publish, adapt, save and merge; return the bits per byte of the new text. freeze: the dense weights."""
    torch.manual_seed(0)
    start = time.perf_counter()
    english = torch.tensor(list("\n".join(topics.values()).encode()))
    code = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    with tempfile.TemporaryDirectory() as place:
        checkpoint, rows, merged = (
            Path(place, "published"),
            Path(place, "rows.safetensors"),
            Path(place, "merged"),
        )
        checkpoint.mkdir()
        model = Decoder()
        nn.init.normal_(model.trigrams.weight, std=0.02)
        host_tables(model, 1e6)
        train(model, english, steps)
        publish(model, checkpoint)
        size = sum(file.stat().st_size for file in checkpoint.glob("rows-*"))
        print(f"1. trained a decoder on English: {bits(model, english):.3f} bits per byte of English")
        print(f"2. published its table: {ROWS:,} rows of {WIDTH}, FP8, {PIECES} pieces, {size / 1e6:.1f} MB")
        adapted = opened(checkpoint, "rows")
        (table,) = find_tables(adapted).values()
        print(f"3. mapped it; {table.num_rows:,} rows stay in the files, frozen")
        found = {"published": bits(adapted, code)}
        print(f"4. source code before: {found['published']:.3f} bits per byte")
        for parameter in dense_parameters(adapted):
            parameter.requires_grad_(not freeze)
        train(adapted, code, steps)
        found["adapted"] = bits(adapted, code)
        print(
            f"5. trained {'the rows alone' if freeze else 'rows and dense weights'}: {found['adapted']:.3f}"
        )
        save_rows(adapted, rows)
        count = len(load_file(rows)["trigrams.ids"])
        print(f"6. saved {count:,} trained rows: {rows.stat().st_size / 1e6:.1f} MB")
        merge_rows(checkpoint, rows, merged)
        print("7. merged them into a copy of the checkpoint")
        linked = sum(file.samefile(merged / file.name) for file in checkpoint.iterdir())
        print(f"8. files that did not change are linked: {linked}")
        again = opened(merged, None)
        rest = {key: value for key, value in adapted.state_dict().items() if "trained" not in key}
        again.load_state_dict(rest)
        found["merged"] = bits(again, code)
        print(f"9. the merged checkpoint: {found['merged']:.3f} bits per byte of source code")
    print(f"10. took {time.perf_counter() - start:.0f} s")
    return found


if __name__ == "__main__":
    main()
