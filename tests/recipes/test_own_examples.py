"""The recipes of examples/ learn, resume to the same bits, load, and predict."""

from pathlib import Path

import pytest
import torch

import dphybrid
from dphybrid.embedding import find_tables
from dphybrid.recipes import find_recipe
from tests.commands import run_with
from tests.training.stopping import stopped_and_resumed

pytestmark = pytest.mark.usefixtures("unrecorded")

SASREC, WORD2VEC = "examples.own_sasrec:SasRec", "examples.own_word2vec:Word2Vec"


def values_of(recipe: str, *values: str) -> list[str]:
    return [f"recipe={recipe}", "devices=cpu*2", *values]


@pytest.mark.slow
def test_sasrec(data_dir: Path) -> None:
    values = values_of(SASREC, "train.epochs=3")
    whole = run_with(*values)
    assert whole.metrics["ndcg_at_10"] > 0.3  # of 60 items; at random, 0.08
    assert stopped_and_resumed(*values, at=20).digests == whole.digests
    predictor = dphybrid.load("broken")
    items = predictor.vocabularies["item"].values
    assert predictor.predict(find_recipe(SASREC).example)["next"].is_in(items).all()
    starts = [f"item {n}|item {n + 1}|item {n + 2}" for n in range(40)]
    following = [f"item {n + k}" for n in range(40) for k in (3, 4)]
    found = predictor.predict({"items": starts})["next"]
    right = sum(item in following[2 * n : 2 * n + 2] for n, item in enumerate(found))
    assert right > 10  # of 40; at random, 1


@pytest.mark.parametrize("tied", ["false", "true"])
def test_word2vec(tied: str, data_dir: Path) -> None:
    values = values_of(WORD2VEC, "data.sentences=300", "train.epochs=3", f"model.tied={tied}")
    whole = run_with(*values)
    assert run_with(*values, "train.pipeline=off").digests == whole.digests
    assert stopped_and_resumed(*values, at=30).digests == whole.digests
    model = dphybrid.load_model("broken")
    assert list(find_tables(model)) == (["words"] if tied == "true" else ["words", "near"])
    rows = torch.arange(2, model.words.num_rows)
    assert torch.equal(model.words(rows), model.near(rows)) is (tied == "true")
    found = dphybrid.load("broken").predict({"word": ["ship", "oven", "moon"]})["nearest"].to_list()
    topics = ["sea wave ship sail tide", "bread flour oven salt dough", "star orbit moon comet sun"]
    for nearest, topic in zip(found, topics, strict=True):
        assert len(set(nearest.split()) & set(topic.split())) >= 2
