"""The script that compares the recipes with others does compare."""

import json
import random
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dphybrid.util.errors import UserError
from examples import quality


def test_the_script_compares_on_the_same_rows(
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
    asked = ["--only", "adult", "--table", str(tmp_path / "clicks.csv"), "--label", "clicked", "--seeds", "1"]
    found = quality.main([*asked, "--out", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text()) == found
    part, told = found["adult"], capsys.readouterr().out
    assert (part["train_rows"], part["valid_rows"], part["seeds"]) == (480, 120, [0])
    assert part["runs"].keys() == {quality.TREES, *quality.CTR}
    assert part["runs"][quality.TREES][0]["auc"] > 0.85
    for name, (run,) in part["runs"].items():
        assert 0.4 < run["auc"] <= 1
        assert f"| {name} | {run['auc']:.4f} |" in told


def test_the_script_says_what_it_lacks(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"there is no wn18rr; name the folder that holds it"):
        quality.main(["--only", "wn18rr", "--data", str(tmp_path), "--out", str(tmp_path / "found.json")])
    monkeypatch.setattr(quality, "installed", lambda name: "")
    with pytest.raises(UserError, match=r"scikit-learn is not installed.*or --only text"):
        quality.adult(tmp_path / "clicks.csv", "clicked", range(1), dict)


def test_an_interrupted_script_leaves_what_it_has_finished(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wn18rr").mkdir()
    lines = [f"e{i}\tr{i % 3}\te{(i * 7 + 1) % 20}" for i in range(20)]
    for part in ("train", "valid", "test"):
        (tmp_path / "wn18rr" / f"{part}.txt").write_text("\n".join(lines))
    small = {"dim": 4, "epochs": 1, "negatives": 0}
    monkeypatch.setattr(quality, "KGE", {"first": small, "second": small | {"dim": 5}})
    asked = ["--only", "wn18rr", "--data", str(tmp_path), "--out", str(tmp_path / "found.json")]
    with pytest.raises(UserError, match=r"model\.dim=5"):
        quality.main(asked)
    (run,) = json.loads((tmp_path / "found.json").read_text())["wn18rr"]["runs"].values()
    assert 0 < run["mrr"]["test"] <= 1
    monkeypatch.setattr(quality, "KGE", {"first": small})
    assert "| first, 1 epochs | " in "\n".join(quality.lines(quality.main(asked)))


def test_trees_get_frequent_values_as_numbers_and_none_as_nan() -> None:
    texts = pl.Series("kind", ["b", "a", "b", None, "new"])
    found = quality.codes(texts, train_rows=np.arange(4))
    assert found.tolist()[:3] == [0, 1, 0]
    assert str(found[3]) == "nan"
    assert found[4] == 2  # with all other rare ones
