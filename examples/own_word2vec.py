"""A recipe with two tables that share a vocabulary and negative sampling: word2vec (Mikolov et al. 2013), or
one table for both sides with `--model.tied true`.

    dphybrid train --recipe examples.own_word2vec:Word2Vec --devices 'cpu*2'

Letters: B pairs of words, K negatives, V words, D width of a row.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from dphybrid.data import Dataset, DrawnDataset, Draws, Vocabulary
from dphybrid.embedding import rank_rows
from dphybrid.parallel import DataParallel
from dphybrid.recipes import DataConfig, ModelConfig, ModelContext, Recipe, Task

Batch = dict[str, Tensor]
TOPICS = ("sea wave ship sail tide", "bread flour oven salt dough", "star orbit moon comet sun")
"""Made-up sentences have words of one topic."""


class TextData(DataConfig):
    sentences: int = Field(default=600, ge=20)
    """Made-up sentences of seven words."""
    window: int = Field(default=2, ge=1)
    """Words on each side of a word that it is paired with."""
    least: int = Field(default=3, ge=1)
    """Times that a word must occur to have a row of its own."""


class PairModel(ModelConfig):
    dim: int = Field(default=16, ge=1)
    """Width of a word's row."""
    negatives: int = Field(default=5, ge=1)
    """Words drawn for each pair, the frequent ones more often."""
    tied: bool = False
    """Are a word's row and its row as another word's neighbour the same?"""


def pairs(ids: list[np.ndarray], window: int) -> dict[str, np.ndarray]:
    """Return each word with each of its neighbours."""
    shifts = range(1, window + 1)
    found = [np.stack([one[shift:], one[: len(one) - shift]], 1) for one in ids for shift in shifts]
    both = np.concatenate([*found, *(pair[:, ::-1] for pair in found)])
    return {"word_B": both[:, 0], "near_B": both[:, 1]}


class Scores(nn.Module):
    """word_BD, near_BD, drawn_BKD -> loss_B and the score of the pair."""

    def forward(self, word_BD: Tensor, near_BD: Tensor, drawn_BKD: Tensor) -> tuple[Tensor, Tensor]:
        score_B = (word_BD * near_BD).sum(1)
        drawn_BK = (word_BD.unsqueeze(1) * drawn_BKD).sum(2)
        return softplus(-score_B) + softplus(drawn_BK).sum(1), score_B


class Net(nn.Module):
    def __init__(self, context: ModelContext[PairModel]) -> None:
        super().__init__()
        num_words, dim, tied = context.num_ids("word"), context.options.dim, context.options.tied
        self.words = context.table(num_words, dim, name="words")
        self.near = self.words if tied else context.table(num_words, dim, name="near", std=0.01)
        self.region = DataParallel(Scores(), context.devices)

    def table_ids(self, batch: Batch) -> dict[str, list[Tensor]]:
        """The ids that `forward` looks up, so that GPUs get the next batch's rows ahead."""
        word, near = [batch["word_B"]], [batch["near_B"], batch["drawn_BK"]]
        return {"words": word + near} if self.near is self.words else {"words": word, "near": near}

    def forward(self, batch: Batch) -> Batch:
        rows_of = self.region.rows  # sends each device its share
        word, near = rows_of(self.words, batch["word_B"]), rows_of(self.near, batch["near_B"])
        loss_B, score_B = self.region(word, near, rows_of(self.near, batch["drawn_BK"]))
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "score_B": score_B}


def loss_of_pairs(outputs: Batch) -> dict[str, float]:
    return {name: float(outputs[of].double().mean()) for name, of in (("loss", "loss"), ("score", "score_B"))}


class Word2Vec(Recipe):
    name = "word2vec"
    summary = "Vectors of words, from the words beside them."
    data = TextData
    model = PairModel
    train = {"epochs": 4, "batch_size": 256}
    table = {"optimizer": "adagrad", "lr": 0.2}
    example = {"word": ["ship", "oven", "a word that no sentence has"]}

    def rows(self, data: TextData, seed: int) -> tuple[Any, Any, dict[str, Vocabulary]]:
        random, topics = np.random.default_rng(seed), [topic.split() for topic in TOPICS]
        texts = [random.choice(topics[n % len(topics)], 7).tolist() for n in range(data.sentences)]
        words = Vocabulary.fit(texts, least=data.least)
        ids = [words.ids(text) for text in texts]
        valid = pairs(ids[::10], data.window)
        # Evaluation draws once, here; training draws anew in each epoch.
        valid["drawn_BK"] = random.integers(2, len(words), (len(valid["word_B"]), 5))
        train = pairs([one for n, one in enumerate(ids) if n % 10], data.window)
        train["drawn_BK"] = np.zeros((len(train["word_B"]), 5), np.int64)
        return train, valid, {"word": words}

    def training_rows(self, rows: Dataset, info: Mapping[str, Any], model: PairModel) -> Dataset:
        def draw(_: Batch, draws: Draws) -> Batch:
            # The vocabulary is sorted by frequency: squares of uniform numbers prefer its beginning.
            rank_BK = draws.uniform(model.negatives) ** 2 * (info["num_ids"]["word"] - 2)
            return {"drawn_BK": 2 + torch.from_numpy(rank_BK.astype(np.int64))}

        return DrawnDataset(rows, draw)

    def build(self, context: ModelContext[PairModel]) -> nn.Module:
        return Net(context)

    def task(self, info: Mapping[str, Any]) -> Task:
        return Task("loss", False, loss_of_pairs, reads=("score_B",))

    def predict(self, model: Any, rows: pl.DataFrame, vocabularies: Mapping[str, Vocabulary]) -> pl.DataFrame:
        """The three words whose rows point where each word's does."""
        words = vocabularies["word"]
        asked_B = torch.from_numpy(words.ids(rows["word"]))
        shared = torch.arange(words.first).expand(len(asked_B), -1)  # rows without a word of their own
        hidden = torch.cat([asked_B.unsqueeze(1), shared], 1)
        best = rank_rows(model.words(asked_B), normalize(model.words.weight, dim=1), hidden_QS=hidden, k=3)
        nearest = [" ".join(words.value(row) or "" for row in places) for places in best.rows_QK.tolist()]
        return rows.select("word").with_columns(nearest=pl.Series(nearest))
