"""The script that compares the recipes with others does compare."""

import json
import random
from pathlib import Path

import numpy as np
import polars as pl
import pytest

pytest.importorskip("sklearn")

from examples import quality


def test_models_see_the_same_rows(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    lines = ["size,kind,clicked"]
    for _ in range(300):
        size, kind = draw.random(), draw.choice(["a", "b", "c", "?"])
        clicked = (size > 0.5) == (kind == "a") if draw.random() < 0.9 else draw.random() < 0.5
        lines.append(f"{size:.3f},{kind},{int(clicked)}")
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    asked = ["--only", "tables", "--table", str(tmp_path / "clicks.csv"), "--label", "clicked"]
    found = quality.main([*asked, "--seeds", "1", "--out", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text()) == found
    table, told = found["groups"]["table: 300 rows"], capsys.readouterr().out
    assert table["metric"] == "AUC"
    assert table["runs"].keys() == quality.MODELS.keys()
    assert table["runs"]["HistGradientBoosting"][0]["value"] > 0.85
    for name, (run,) in table["runs"].items():
        assert 0.4 < run["value"] <= 1
        assert f"| {name} | {run['value']:.4g} |" in told


def test_lists_hide_what_a_user_has_met_and_are_judged_by_ndcg() -> None:
    known = pl.DataFrame({"user": ["u", "u", "v"], "item": ["b", "c", "a"]})
    lists = quality.by_scores(known, lambda met_UI: np.array([1.0, 3.0, 2.0]))  # of a, b, c
    assert lists["v"] == ["b", "c", "a"]  # met: at the end, as there are no others
    assert lists["u"][0] == "a"
    wanted = pl.DataFrame({"user": ["v", "v"], "item": ["c", "z"]})
    assert quality.ndcg(lists, wanted) == pytest.approx((1 / np.log2(3)) / (1 + 1 / np.log2(3)))


def test_recommenders_find_planted_groups(data_dir: Path, tmp_path: Path) -> None:
    """Even users like even items, each of them all but some: popularity cannot tell them apart."""
    draw = random.Random(0)
    pairs = [(user, item) for user in range(40) for item in range(user % 2, 60, 2)]
    lines = [f"{user}\t{item}\t5\t0" for user, item in pairs if draw.random() < 0.7]
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "u.data").write_text("\n".join(lines))
    asked = ["--only", "retrieval", "--data", str(tmp_path), "--seeds", "1"]
    found = quality.main([*asked, "--out", str(tmp_path / "found.json")])["groups"]["MovieLens-100k"]["runs"]
    assert found.keys() == quality.RECOMMENDERS.keys()
    scores = {name: runs[0]["value"] for name, runs in found.items()}
    assert scores["EASE"] > scores["most popular"] + 0.1
    assert 0 < scores["retrieval, defaults"] <= 1
