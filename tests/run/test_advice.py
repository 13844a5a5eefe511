"""What a report says about columns, and after a run that loses to a baseline."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

import dphybrid
from dphybrid.data.table.numbers import LISTS
from dphybrid.recipes.configs import build_config
from dphybrid.run.report import advice
from dphybrid.training.importance import importance, in_memory, num_rows
from dphybrid.training.metrics import BINARY
from tests.preparing import table_of
from tests.refusing import refused


class Linear(nn.Module):
    """The first number is the logit; the id and the second number do not count."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = batch["dense_BN"][:, 0]
        return {"logits": logits, "loss": torch.zeros_like(logits), "weight": torch.ones_like(logits)}


def test_importance_is_what_the_metric_loses_and_has_bounds() -> None:
    torch.manual_seed(0)
    dense_BN = torch.randn(9000, 2)
    before_BN = dense_BN.clone()
    labels_B = (dense_BN[:, 0] + torch.randn(9000) > 0).float()
    rows = in_memory({"dense_BN": dense_BN, "ids_BF": torch.zeros(9000, 1).long(), "labels_B": labels_B})
    places = {"a": [("dense_BN", 0)], "b": [("dense_BN", 1), ("ids_BF", 0)]}
    told = list[tuple[str, int, int]]()
    found = importance(Linear(), rows, BINARY, places, 1000, lambda *now: told.append(now))
    assert list(found) == ["a", "b"]
    assert found["b"] == 0
    some = np.linspace(0, 8999, 4096).astype(np.int64)
    auc = BINARY.compute({"logits": dense_BN[some, 0], "labels_B": labels_B[some]})["auc"]
    assert found["a"] == pytest.approx(auc - 0.5, abs=0.02)  # a shuffled column says nothing
    assert told == [("shuffle columns", 0, 2), ("shuffle columns", 1, 2)]
    assert dense_BN.equal(before_BN)
    assert importance(Linear(), rows, BINARY, places, 1000, seconds=0) == {}
    assert (num_rows(100, 5), num_rows(10**6, 16), num_rows(10**6, 10**5)) == (100, 4096, 256)


def test_the_places_of_a_column_are_all_that_its_cells_change(tmp_path: Path) -> None:
    cells = {
        "n": [i * 7 % 40 if i % 9 else "" for i in range(400)],
        "c": ["abc"[i % 3] for i in range(400)],
        "day": [f"2026-01-{1 + i % 28:02d}" for i in range(400)],
        "bag": ["x|y" if i % 2 else "y|z" for i in range(400)],
        "y": [i % 2 for i in range(400)],
    }
    values: dict[str, Any] = {"numeric": ("n",), "times": ("day",), "bags": ("bag",), "buckets": 2}
    data = table_of(tmp_path, cells, **values)
    from dphybrid.data.table.encoder import Encoder

    encoder = Encoder.load(data.path / "encoder")
    frame = pl.DataFrame({name: list(map(str, cells[name])) for name in encoder.names})
    whole, _ = encoder.encode({name: frame[name] for name in encoder.names})
    for name in encoder.names:
        changed, _ = encoder.encode(
            {other: frame[other].reverse() if other == name else frame[other] for other in encoder.names}
        )
        there = [
            (array, place)
            for array in whole
            for place in range(whole[array].shape[1])
            if not np.array_equal(whole[array][:, place], changed[array][:, place])
        ]
        assert set(there) <= set(encoder.positions[name]), name
        assert there, name
    every = [place for places in encoder.positions.values() for place in places]
    assert len(set(every)) == len(every) == sum(array.shape[1] for array in whole.values())


def test_a_run_says_which_columns_matter_and_what_to_try_if_a_baseline_is_better(
    data_dir: Path, unrecorded: None
) -> None:
    random = np.random.default_rng(0)
    price_B = random.normal(size=400)
    rows = pl.DataFrame(
        {"noise": random.integers(0, 9, 400).astype(str), "price": price_B.round(3), "y": (price_B > 0) * 1}
    )
    run = dphybrid.train(rows, label="y", epochs=1, batch_size=320, train__lr=1e-6, devices="cpu", quiet=True)
    found = run.importance()
    assert (
        found["column"].to_list() == run.importance(rows)["column"].to_list()
        or found["importance"].abs().max() < 0.1
    )
    report = run.report()
    lines = report.text.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("Try "))
    assert lines[first].startswith("Try columns: ")
    joined = " ".join(line.strip() for line in lines)
    assert "the last of 1 was the best; try --train.epochs 4" in joined
    assert "320 rows are few for it; try --model.hidden 32 --model.dim 4" in joined
    assert "lost when a column is shuffled" in joined
    assert max(len(line) for line in lines if str(data_dir) not in line) <= 80
    page = report.page()
    assert "Which columns matter" in page
    assert "try --train.epochs 4" in page

    good = dphybrid.train(rows.drop("noise"), label="y", epochs=30, devices="cpu", quiet=True)
    assert good.importance()["importance"][0] > 0.3
    words = dphybrid.train(recipe="toy", devices="cpu", quiet=True)
    with refused("the importance of its columns was not measured"):
        words.importance()


def test_advice_follows_the_data_the_curve_and_the_network() -> None:
    config = build_config({"recipe": "ctr", "data": {"label": "y"}})
    column = {"name": "zip", "role": "numeric", "reason": ""}
    facts: dict[str, Any] = {"columns": [column], "unseen": {"user": 0.4}}
    lines = advice(config, facts, 50_000, {}, 1, 9)
    assert [line.partition(":")[0] for line in lines] == ["columns", "epochs", "network"]
    assert lines[0].endswith(
        "40% of the validation values of user have no training row; try --data.ignore user"
    )
    assert lines[1].endswith("it learns too fast; try --train.lr 0.00033")
    assert lines[2].endswith("mlp is one of several; try --model.kind wide-deep or deepfm or dlrm")
    facts["unseen"] = {}
    # By what preparing says of all cells, not by a sample with a mark in it.
    facts["columns"] = [{"name": "a", "role": "categorical", "reason": f"60% hold '|'; {LISTS}"}]
    assert advice(config, facts, 50_000, {}, 5, 9)[0].endswith("look like lists of values; try --data.bags a")
    facts["columns"][0]["name"] = "a b"
    assert advice(config, facts, 50_000, {}, 5, 9)[0].endswith("try --data.bags 'a b'")
    facts["columns"] = [{"name": "a", "role": "categorical", "reason": "", "samples": ["x|y"]}]
    assert advice(config, facts, 50_000, {"b": 0.1, "a": -0.01}, 5, 9)[0].endswith("try --data.ignore a")
    assert "dphybrid prepare shows" in advice(config, facts, 50_000, {}, 5, 9)[0]
    toy = build_config({"recipe": "toy"})
    assert advice(toy, {}, 100, {}, 3, 3) == ["epochs: the last of 3 was the best; try --train.epochs 6"]
