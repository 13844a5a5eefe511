"""A recipe with negative sampling and two tables over one vocabulary: word2vec (Mikolov et al. 2013). With
`--model.tied true` it has one table for both sides.

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
"""Words of the made-up sentences; each sentence has words of one topic."""


class TextData(DataConfig):
    sentences: int = Field(default=600, ge=20)
    """Number of made-up sentences, of seven words each."""
    window: int = Field(default=2, ge=1)
    """A word is paired with this many words on each side."""
    least: int = Field(default=3, ge=1)
    """A word needs this many occurrences to have its own row."""


class PairModel(ModelConfig):
    dim: int = Field(default=16, ge=1)
    """Width of a word's row."""
    negatives: int = Field(default=5, ge=1)
    """Random words for each pair, frequent words more often."""
    tied: bool = False
    """Whether a word and its role as another word's neighbour share one row."""


def pairs(ids: list[np.ndarray], window: int) -> dict[str, np.ndarray]:
    """Return all pairs of a word and one of its neighbours, in both directions."""
    shifts = range(1, window + 1)
    found = [np.stack([one[shift:], one[: len(one) - shift]], 1) for one in ids for shift in shifts]
    both = np.concatenate([*found, *(pair[:, ::-1] for pair in found)])
    return {"word_B": both[:, 0], "near_B": both[:, 1]}


class Scores(nn.Module):
    """(word_BD, near_BD, drawn_BKD) -> loss_B, and score_B of the pairs."""

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
        """Return the ids that `forward` looks up in each table, so that their rows can be prefetched."""
        word, near = [batch["word_B"]], [batch["near_B"], batch["drawn_BK"]]
        return {"words": word + near} if self.near is self.words else {"words": word, "near": near}

    def forward(self, batch: Batch) -> Batch:
        rows_of = self.region.rows  # sends each device only the rows of its own samples
        word, near = rows_of(self.words, batch["word_B"]), rows_of(self.near, batch["near_B"])
        loss_B, score_B = self.region(word, near, rows_of(self.near, batch["drawn_BK"]))
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "score_B": score_B}


def loss_of_pairs(outputs: Batch) -> dict[str, float]:
    return {name: float(outputs[of].double().mean()) for name, of in (("loss", "loss"), ("score", "score_B"))}


class Word2Vec(Recipe):
    name = "word2vec"
    summary = "Vectors of words, learned from their neighbours."
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
        # Negatives of the validation split are drawn once, here; training replaces its zeros in each epoch.
        valid["drawn_BK"] = random.integers(2, len(words), (len(valid["word_B"]), 5))
        train = pairs([one for n, one in enumerate(ids) if n % 10], data.window)
        train["drawn_BK"] = np.zeros((len(train["word_B"]), 5), np.int64)
        return train, valid, {"word": words}

    def training_rows(self, rows: Dataset, info: Mapping[str, Any], model: PairModel) -> Dataset:
        def draw(_: Batch, draws: Draws) -> Batch:
            # The vocabulary is sorted by frequency, and squares of uniform numbers prefer its beginning. The
            # first two rows (missing, unknown) are not drawn.
            rank_BK = draws.uniform(model.negatives) ** 2 * (info["num_ids"]["word"] - 2)
            return {"drawn_BK": 2 + torch.from_numpy(rank_BK.astype(np.int64))}

        return DrawnDataset(rows, draw)

    def build(self, context: ModelContext[PairModel]) -> nn.Module:
        return Net(context)

    def task(self, info: Mapping[str, Any]) -> Task:
        return Task("loss", False, loss_of_pairs, reads=("score_B",))

    def predict(self, model: Any, rows: pl.DataFrame, vocabularies: Mapping[str, Vocabulary]) -> pl.DataFrame:
        """Return for each word the three words whose rows have the most similar direction."""
        words = vocabularies["word"]
        asked_B = torch.from_numpy(words.ids(rows["word"]))
        # Leave out the rows that belong to no single word, and the word itself.
        shared = torch.arange(words.first).expand(len(asked_B), -1)
        hidden = torch.cat([asked_B.unsqueeze(1), shared], 1)
        best = rank_rows(model.words(asked_B), normalize(model.words.weight, dim=1), hidden_QS=hidden, k=3)
        nearest = [" ".join(words.value(row) or "" for row in places) for places in best.rows_QK.tolist()]
        return rows.select("word").with_columns(nearest=pl.Series(nearest))
