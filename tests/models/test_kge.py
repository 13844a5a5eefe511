"""Knowledge-graph embeddings: scores and ranks against naive references, and learning."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dphybrid.data import Prepared, batches
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import ModelContext, find_recipe
from dphybrid.recipes.kge import KgeDataConfig, KgeModelConfig
from dphybrid.recipes.kge.model import TripleModel
from tests.commands import run_with
from tests.preparing import prepare
from tests.refusing import refused

KINDS = ["distmult", "complex", "rotate", "transe"]


def graph(folder: Path, num_entities: int = 30, num_triples: int = 120, **values: object) -> Prepared:
    random = np.random.default_rng(0)
    triples = {
        (f"e{h}", f"r{r}", f"e{t}")
        for h, r, t in random.integers(0, [num_entities, 3, num_entities], (num_triples, 3))
    }
    lines = ["\t".join(triple) for triple in sorted(triples)]
    (folder / "graph").mkdir()
    for part, chosen in (("train", lines[::2]), ("valid", lines[1::4]), ("test", lines[3::4])):
        (folder / "graph" / f"{part}.txt").write_text("\n".join(chosen) + "\n")
    config = KgeDataConfig(path=str(folder / "graph"), **{"negatives": 8} | values)  # type: ignore[arg-type]
    return prepare("kge", config, folder / "prepared", 0)


def model_for(data: Prepared, kind: str, devices: str = "cpu") -> TripleModel:
    options = KgeModelConfig(kind=kind, dim=6, penalty=0.0, dtype="float64")  # type: ignore[arg-type]
    model = find_recipe("kge").new_model(ModelContext(resolve_devices(devices), data.info, options, 1))
    with torch.no_grad():  # fresh rows are so small that all their scores are equal
        model.entities.weight.mul_(200)
        model.region.module.relations.weight.mul_(1000)
    return model


def naive_score(kind: str, head: list[float], relation: list[float], tail: list[float]) -> float:
    if kind == "distmult":
        return sum(a * b * c for a, b, c in zip(head, relation, tail, strict=True))
    if kind == "transe":
        return -sum(abs(a + b - c) for a, b, c in zip(head, relation, tail, strict=True))
    half = len(head) // 2
    h, r, t = ([complex(row[i], row[half + i]) for i in range(half)] for row in (head, relation, tail))
    if kind == "complex":
        return sum((a * b * c.conjugate()).real for a, b, c in zip(h, r, t, strict=True))
    return -sum(abs(a * b / abs(b) - c) for a, b, c in zip(h, r, t, strict=True))


@pytest.mark.parametrize(("kind", "devices"), [("complex", "cpu"), *((kind, "cpu*3") for kind in KINDS)])
def test_ranks_are_those_of_a_naive_reference(
    kind: str, devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several blocks of entities, a short one last
    monkeypatch.setattr(
        "dphybrid.embedding.ranking.SCORES", 2 * 10 * 7 * (6 if kind in ("rotate", "transe") else 1)
    )
    data = graph(tmp_path)
    model = model_for(data, kind, devices).eval()
    table = model.entities.weight.detach()
    table[3] = table[4]  # equal scores
    relations = model.region.module.relations.weight.tolist()
    arrays, num_relations, num_entities = data.arrays, data.info["num_relations"], data.info["num_entities"]
    known = {tuple(row) for part in ("train", "valid", "test") for row in arrays[f"{part}_triples"].tolist()}

    def rank_and_loss(asked: int, relation: int, answer: int, others: list[int]) -> tuple[float, float]:
        own = naive_score(kind, table[asked].tolist(), relations[relation], table[answer].tolist())
        row = table[asked].tolist()
        scores = [naive_score(kind, row, relations[relation], table[other].tolist()) for other in others]
        equal = [abs(score - own) < 1e-12 for score in scores]
        above = sum(score > own and not same for score, same in zip(scores, equal, strict=True))
        return 1 + above + sum(equal) / 2, math.log(sum(math.exp(score - own) for score in [own, *scores]))

    expected_ranks, expected_losses = [], []
    for head, relation, tail in arrays["valid_triples"].tolist():
        tails = [e for e in range(num_entities) if e != tail and (head, relation, e) not in known]
        heads = [e for e in range(num_entities) if e != head and (e, relation, tail) not in known]
        one = rank_and_loss(head, relation, tail, tails)
        two = rank_and_loss(tail, relation + num_relations, head, heads)
        expected_ranks.append([one[0], two[0]])
        expected_losses.append(one[1] + two[1])
    drawn = batches(data.dataset("valid"), 10, seed=0, epoch=0, shuffle=False)
    with torch.no_grad():
        outputs = [model(batch) for batch in drawn]
    assert torch.cat([o["ranks_B2"] for o in outputs]).tolist() == expected_ranks
    assert torch.cat([o["loss"] for o in outputs]).tolist() == pytest.approx(expected_losses)


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_loss_is_a_softmax_on_any_split(kind: str, tmp_path: Path) -> None:
    """Over the answer and the negatives, which stand for all other entities."""
    data = graph(tmp_path)
    (batch, *_) = batches(data.dataset("train"), 10, seed=0, epoch=0, shuffle=True)
    one, three = model_for(data, kind), model_for(data, kind, "cpu*3")
    loss_B = one(batch)["loss"].detach()
    torch.testing.assert_close(loss_B, three(batch)["loss"].detach(), rtol=1e-12, atol=1e-12)
    table, relations = one.entities.weight.tolist(), one.region.module.relations.weight.tolist()
    num_entities, num_relations = data.info["num_entities"], data.info["num_relations"]
    weight = math.log((num_entities - 1) / 8)
    triples = zip(*(batch[f"{name}_B"].tolist() for name in ("heads", "relations", "tails")), strict=True)
    for loss, (head, relation, tail) in zip(loss_B.tolist(), triples, strict=True):
        expected = 0.0
        for asked, row, answer in ((head, relation, tail), (tail, relation + num_relations, head)):
            all_K = [answer, *(e for e in batch["negatives_K"].tolist() if e != answer)]
            own, *scores = (naive_score(kind, table[asked], relations[row], table[e]) for e in all_K)
            expected += math.log(1 + sum(math.exp(score + weight - own) for score in scores))
        assert loss == pytest.approx(expected)


def test_the_penalty_follows_the_triples_an_entity_and_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    data = graph(tmp_path)
    rows, options = data.dataset("train"), KgeModelConfig(dim=6, penalty=0.3, dtype="float64")
    context = ModelContext(resolve_devices("cpu"), data.info, options, 1, rows=rows)
    model, loaded = (find_recipe("kge").new_model(one) for one in (context, replace(context, rows=None)))
    loaded.load_state_dict(model.state_dict())
    (batch, *_) = batches(rows, 10, seed=0, epoch=0, shuffle=True)
    entities, relations = (model.entities.weight.detach(), model.region.module.relations.weight.detach())
    places = batch["relations_B"], batch["relations_B"] + data.info["num_relations"]
    four = [entities[batch["heads_B"]], entities[batch["tails_B"]], *(relations[place] for place in places)]
    cubes_B = sum(torch.complex(*rows.chunk(2, 1)).abs().pow(3).sum(1) for rows in four)
    weight = 0.3 / math.sqrt(len(rows) / data.info["num_entities"])
    for one in (model, loaded):
        one.train()
        penalized_B = one(batch)["loss"]
        one.region.eval()
        torch.testing.assert_close(penalized_B - one(batch)["loss"], weight * cubes_B, rtol=1e-4, atol=1e-12)


def test_it_learns_relations_with_a_pattern(unrecorded: None, tmp_path: Path) -> None:
    """Two relations and their inverses on a ring: `next` holds between neighbours, `before` says the same the
    other way round."""
    following = [f"e{i}\tnext\te{(i + 1) % 60}" for i in range(60)]
    before = [f"e{(i + 1) % 60}\tbefore\te{i}" for i in range(60)]
    (tmp_path / "ring").mkdir()
    train = [*following, *(line for i, line in enumerate(before) if i % 6)]
    (tmp_path / "ring" / "train.txt").write_text("\n".join(train))
    (tmp_path / "ring" / "valid.txt").write_text("\n".join(before[::6]))
    values = ["recipe=kge", f"data.path={tmp_path / 'ring'}", "data.negatives=60", "train.batch_size=32"]
    values += ["train.epochs=25", "model.dim=32", "model.penalty=0.01", "devices=cpu"]
    report = run_with(*values)
    assert report.metrics["mrr"] > 0.9
    assert report.metrics["hits_at_1"] <= report.metrics["hits_at_3"] <= report.metrics["hits_at_10"] <= 1


def test_wrong_options_are_told(tmp_path: Path) -> None:
    data = graph(tmp_path)
    options = KgeModelConfig(kind="complex", dim=7)
    with refused("even"):
        find_recipe("kge").new_model(ModelContext(resolve_devices("cpu"), data.info, options, 0))
