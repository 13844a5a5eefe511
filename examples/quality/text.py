"""Text: compares recipe text with the same LSTM in plain PyTorch.

Letters: B samples, T tokens of a sample, H width of the network, X tokens of a batch.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dphybrid.config.settings import load_settings
from dphybrid.data import batches
from dphybrid.embedding import DeclaresIds, RowPipeline, clip_grad_norm_, row_optimizer
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import ModelContext, find_recipe
from dphybrid.recipes.configs import load_config
from dphybrid.recipes.text.model import IGNORED
from dphybrid.training.optimizers import make_dense_optimizer
from examples.quality.common import Keep, Page, taking, tell

STEPS = 12
"""Steps of a turn. The first turn is a warm-up and not timed."""


class PlainText(nn.Module):
    """The text recipe's network in plain PyTorch, with the table as an ordinary parameter."""

    def __init__(self, num_words: int, dim: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(num_words, dim), nn.Dropout(dropout)
        between = dropout if layers > 1 else 0.0  # torch warns of one where there is nothing between
        self.network = nn.LSTM(dim, hidden, layers, batch_first=True, dropout=between)
        self.output = nn.Linear(hidden, num_words)
        for weight in (self.words.weight, self.output.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden_BTH = self.dropout(self.network(self.dropout(self.words(batch["ids_BT"])))[0])
        targets_X = batch["targets_BT"].flatten()
        loss = cross_entropy(
            self.output(hidden_BTH).flatten(0, 1), targets_X, ignore_index=IGNORED, reduction="sum"
        )
        return {"loss": loss, "weight": (targets_X != IGNORED).sum()}


def mean_loss(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["loss"].sum() / outputs["weight"].sum()


def text(path: Path | None, turns: int, keep: Keep) -> None:
    """Time turns of `STEPS` steps: recipe text with its default values, and the same network in two plain
    loops, one with Adam, one trained as pytorch/examples' word_language_model (SGD at 20, clipping at
    0.25)."""
    config = load_config(None, ["recipe=text", "devices=cpu", *([f"data.path={path}"] if path else [])])
    tell("text: preparing")
    recipe = find_recipe("text")
    # Standard output is for the results alone.
    with contextlib.redirect_stdout(sys.stderr):
        data = recipe.prepare(config.data, load_settings().prepared_dir, 0)
    model = recipe.new_model(ModelContext.of(config, data.info, resolve_devices("cpu")))
    dense = make_dense_optimizer(model, config.train)
    rows = row_optimizer(config.table.optimizer, model, lr=config.table.lr)
    assert dense is not None
    assert isinstance(model, DeclaresIds)

    def hybrid_steps(drawn: list[dict[str, Tensor]]) -> None:
        with RowPipeline(model) as pipeline:
            for batch in pipeline.prefetch(drawn, model.table_ids):
                dense.zero_grad()
                rows.zero_grad()
                mean_loss(model(batch)).backward()
                clip_grad_norm_(model.parameters(), config.train.clip_norm)
                dense.step()
                rows.step()

    def plain_steps(plain: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> Any:
        def steps(drawn: list[dict[str, Tensor]]) -> None:
            for batch in drawn:
                optimizer.zero_grad()
                mean_loss(plain(batch)).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
                optimizer.step()

        return steps

    o = config.model.model_dump()
    adams, sgds = (
        PlainText(data.info["num_words"], o["dim"], o["hidden"], o["layers"], o["dropout"]) for _ in range(2)
    )
    adam = torch.optim.Adam(adams.parameters(), lr=config.train.lr)
    sgd = torch.optim.SGD(sgds.parameters(), lr=20.0)
    loops: dict[str, tuple[nn.Module, Callable[[list[dict[str, Tensor]]], None]]] = {
        "text": (model, hybrid_steps),
        "plain, Adam": (adams, plain_steps(adams, adam, config.train.clip_norm)),
        "plain, SGD": (sgds, plain_steps(sgds, sgd, 0.25)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    source = forever(data.dataset("train"), config.train.batch_size)
    for turn in range(1 + turns):
        # Drawn before the clock starts; all loops get the same batches.
        drawn = list(islice(source, STEPS))
        tokens = sum(int((batch["targets_BT"] != IGNORED).sum()) for batch in drawn)
        for name, (_, steps) in loops.items():
            times: Page = {}
            with taking(times):
                steps(drawn)
            if turn:
                speeds[name].append(tokens / times["cpu_s"])
        tell(f"text: turn {turn + 1} of {1 + turns}")
        if turn:
            keep({"steps": STEPS * (turn + 1), "tokens_per_cpu_s": speeds})
    found = {name: perplexity(network, data.dataset("valid")) for name, (network, _) in loops.items()}
    keep({"steps": STEPS * (1 + turns), "tokens_per_cpu_s": speeds, "perplexity": found})


def forever(rows: Any, batch_size: int) -> Iterator[dict[str, Tensor]]:
    for epoch in count():
        yield from batches(rows, batch_size, seed=0, epoch=epoch, shuffle=True)


def perplexity(model: nn.Module, rows: Any) -> float:
    model.eval()
    with torch.no_grad():
        outputs = [model(batch) for batch in batches(rows, 16, seed=0, epoch=0, shuffle=False)]
    loss, weight = (sum(float(o[name].sum()) for o in outputs) for name in ("loss", "weight"))
    return math.exp(loss / weight)
