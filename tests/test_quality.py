"""The script that compares the recipes with others does compare."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dphybrid.util.errors import UserError
from examples.quality import __main__ as quality
from examples.quality import tables, text
from examples.quality.retrieval import RECOMMENDERS, by_scores, ndcg
from tests.refusing import refused


def test_models_are_compared_on_the_same_rows(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    draw = random.Random(0)
    lines = ["size,kind,clicked"]
    for _ in range(600):
        size, kind = draw.random(), draw.choice(["a", "b", "c", "?"])
        clicked = (size > 0.5) == (kind == "a") if draw.random() < 0.9 else draw.random() < 0.5
        lines.append(f"{size:.3f},{kind},{int(clicked)}")
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    asked = ["--only", "tables", "--table", str(tmp_path / "clicks.csv"), "--label", "clicked"]
    found = quality.main([*asked, "--seeds", "1", "--out", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text()) == found
    (table,), told = found["tables"]["tables"].values(), capsys.readouterr().out
    assert (table["rows"], table["task"]) == (600, "binary")
    assert table["runs"].keys() == tables.MODELS.keys()
    assert table["runs"]["HistGradientBoosting"][0]["metric"] > 0.85
    for name, (run,) in table["runs"].items():
        assert 0.4 < run["metric"] <= 1
        assert f"| {name} | {run['metric']:.4g} |" in told


@pytest.mark.parametrize(
    ("text", "label", "task", "labels"),
    [
        ("1, yes\n?, no\n3, yes\n", "1", "binary", [1, 0, 1]),
        ("a,b\n1,x\n2,y\n3,z\n4,\n", "b", "multiclass", [0, 1, 2]),
        ("a,b\n" + "".join(f"u,{n / 2}\n" for n in range(30)), "b", "regression", [n / 2 for n in range(30)]),
    ],
)
def test_a_label_says_what_is_asked(
    tmp_path: Path, text: str, label: str, task: str, labels: list[float]
) -> None:
    (tmp_path / "rows.csv").write_text(text)
    frame, found = tables.labelled(tmp_path / "rows.csv", label)
    assert (found, frame["label"].tolist()) == (task, labels)


def test_the_script_says_what_it_lacks(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(r"there is no wn18rr; name the folder that holds it"):
        quality.main(["--only", "kge", "--data", str(tmp_path), "--out", str(tmp_path / "found.json")])
    monkeypatch.setattr(tables, "installed", lambda name: "")
    with refused(r"scikit-learn is not installed.*or --only text"):
        tables.tables(None, tmp_path / "clicks.csv", "clicked", range(1), dict)


def test_an_interrupted_script_leaves_what_it_has_finished(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wn18rr").mkdir()
    lines = [f"e{i}\tr{i % 3}\te{(i * 7 + 1) % 20}" for i in range(20)]
    for part in ("train", "valid", "test"):
        (tmp_path / "wn18rr" / f"{part}.txt").write_text("\n".join(lines))
    asked = ["--only", "kge", "--data", str(tmp_path), "--out", str(tmp_path / "found.json"), "--epochs", "1"]
    train = quality.train

    def trains_once(*given: Any, seed: int, **values: Any) -> object:
        if seed:
            raise UserError("no second training")
        return train(*given, seed=seed, **values)

    monkeypatch.setattr(quality, "train", trains_once)
    with refused("no second training"):
        quality.main(asked)
    (run,) = json.loads((tmp_path / "found.json").read_text())["kge"]["runs"]["wn18rr"]
    assert 0 < run["mrr"] <= 1
    assert "| wn18rr, 1 epochs | " in "\n".join(quality.lines(quality.main([*asked, "--seeds", "1"])))


def test_lists_hide_what_a_user_has_met_and_are_judged_by_ndcg() -> None:
    known = pl.DataFrame({"user": ["u", "u", "v"], "item": ["b", "c", "a"]})
    lists = by_scores(known, lambda met_UI: np.array([1.0, 3.0, 2.0]))  # of a, b, c
    assert lists["v"] == ["b", "c", "a"]  # met: at the end, as there are no others
    assert lists["u"][0] == "a"
    wanted = pl.DataFrame({"user": ["v", "v"], "item": ["c", "z"]})
    assert ndcg(lists, wanted) == pytest.approx((1 / np.log2(3)) / (1 + 1 / np.log2(3)))


def test_recommenders_find_planted_groups(data_dir: Path, tmp_path: Path) -> None:
    """Even users like even items, each of them all but some: popularity cannot tell them apart."""
    draw = random.Random(0)
    pairs = [(user, item) for user in range(40) for item in range(user % 2, 60, 2)]
    lines = [f"{user}\t{item}\t5\t0" for user, item in pairs if draw.random() < 0.7]
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "u.data").write_text("\n".join(lines))
    asked = ["--only", "retrieval", "--data", str(tmp_path), "--seeds", "1"]
    found = quality.main([*asked, "--out", str(tmp_path / "found.json")])["retrieval"]["runs"]
    assert found.keys() == RECOMMENDERS.keys()
    scores = {name: runs[0]["ndcg"] for name, runs in found.items()}
    assert scores["EASE"] > scores["most popular"] + 0.1
    assert 0 < scores["retrieval, as it comes"] <= 1


def test_text_is_compared_at_equal_steps(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    (tmp_path / "wikitext2").mkdir()
    documents = [" ".join(draw.choices(["a", "b", "c", "d"], k=200)) for _ in range(30)]
    (tmp_path / "wikitext2" / "valid.txt").write_text("\n\n".join(documents))
    monkeypatch.setattr(text, "STEPS", 1)
    asked = ["--only", "text", "--data", str(tmp_path), "--turns", "1", "--out", str(tmp_path / "found.json")]
    found = quality.main(asked)["text"]
    assert found["steps"] == 2
    assert found["perplexity"].keys() == found["tokens_per_cpu_s"].keys()
    assert 3 < found["perplexity"]["text"] < 20  # four words at random, two steps
