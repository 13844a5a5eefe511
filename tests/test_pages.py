"""Trainings that docs and examples show, in one table, and the quick start's commands as they stand."""

import csv
import re
import shlex
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from dphybrid.cli.main import main
from dphybrid.serving.load import load_model
from tests.commands import run_with
from tests.conftest import REPOSITORY, SHARED

ADULT = SHARED / "data" / "adult" / "adult.data"
CLICKS = ["recipe=ctr", "data.path=clicks.csv", "data.label=clicked", "devices=cpu*2"]
CLICKS += ["train.batch_size=32", "train.epochs=20", "table.lr=0.02"]
FILMS = ["devices=cpu*2", "data.num_ratings=2000"]
TRAININGS = {
    "model.md": ([*CLICKS, "model.factory=page_model:Bilinear"], "auc", 0.95),
    "own_model.py": ([*CLICKS, "model.factory=examples.own_model:Factors"], "auc", 0.95),
    "own_recipe.py, a recipe": (["recipe=examples.own_recipe:Ratings", *FILMS], "right", 0.93),
    "own_recipe.py, a frame": (["recipe=examples.own_recipe:FromFrame", *FILMS], "right", 0.93),
    "own_recipe.py, a dataset": (["recipe=examples.own_recipe:FromDataset", *FILMS], "right", 0.93),
    "the text of the first command": (["train.epochs=1", "devices=cpu"], "perplexity", -40),
    "UCI Adult": (["recipe=ctr", f"data.path={ADULT}", "data.label=14", "train.epochs=4"], "auc", 0.915),
}
"""What is trained -> its values, the metric that it reaches, and the least of it (below 0: the most)."""


@pytest.mark.slow
@pytest.mark.parametrize("what", TRAININGS)
def test_what_a_page_trains_reaches_its_metric(
    what: str, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, metric, least = TRAININGS[what]
    if what == "UCI Adult" and not ADULT.is_file():
        pytest.skip("UCI Adult is not here")
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "none")
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.syspath_prepend(str(tmp_path))
    page = (REPOSITORY / "docs/model.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "page_model.py").write_text(code)
    rows = "\n".join(f"{'abcd'[i % 4]},{'xyz'[i % 3]},{i % 7},{int(i % 4 == 0)}" for i in range(400))
    Path("clicks.csv").write_text("one,two,number,clicked\n" + rows)
    report = run_with(*values)
    assert report.metrics[metric] * (1 if least > 0 else -1) >= least
    if what == "own_model.py":  # prefetched to the same bits
        without = run_with(*values, "train.pipeline=off")
        assert without.digests == report.digests
    if metric == "right":
        assert load_model(report.run_name).users.num_rows == 50


HEADER = ["time", "user", "city", "tags", "price", "note", "clicked"]
CITIES = ("Lyon, FR", 'the "Old" Town', "Zürich", "", "Oslo\nNorth")


def write_visits(file: Path, num_rows: int, seed: int) -> list[bool]:
    """Write messy rows; return whether each was clicked: for new tags and low prices, mostly."""
    random = np.random.default_rng(seed)
    clicked = []
    with file.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(HEADER)
        for number in range(num_rows):
            tags = random.choice(["new", "old", "red", "blue"], random.integers(0, 3), replace=False)
            price = round(float(random.uniform(1, 20)), 2)
            likes = ("new" in tags) + (price < 8) + random.normal(0, 0.3) > 0.8
            shown = random.choice([f"{price:.2f}", "NA", ""], p=[0.9, 0.05, 0.05])
            when = f"2026-10-{1 + number % 28:02d} {number % 24:02d}:{number % 60:02d}"
            note = random.choice(['says "maybe"', "a, b", "", "None of it"])
            user, city = f"u{random.integers(300):04d}", CITIES[random.integers(len(CITIES))]
            rows.writerow([when, user, city, "|".join(tags), shown, note, "yes" if likes else "no"])
            clicked.append(bool(likes))
    return clicked


def commands(deployed: bool) -> list[str]:
    """The lines of the page's commands: those at hand, or those that need a server."""
    page = (REPOSITORY / "docs/quickstart.md").read_text(encoding="utf-8")
    at_hand, served = page.split("## Deploy it")
    blocks = re.findall(r"^```sh\n(.*?)^```$", served if deployed else at_hand, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_from_a_messy_table_to_predictions(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_visits(Path("visits.csv"), 1500, 0)
    answers = write_visits(Path("new.csv"), 300, 1)
    told = {}
    for program, *argv in map(shlex.split, commands(deployed=False)):
        assert program == "dphybrid"
        assert main(argv) == 0, (argv, capsys.readouterr().err)
        told[argv[0]] = capsys.readouterr().out
    assert list(told) == ["prepare", "check", "train", "compare", "predict"]
    assert re.search(r"tags +bag", told["train"])
    assert "Reusing prepared data" in told["train"]
    assert re.search(r"1,200 rows", told["check"])
    assert "'user'" not in told["prepare"]
    assert {"first", "deep"} <= set(re.findall(r"\w+", told["compare"]))
    assert "deepfm" in told["compare"]
    scored = pl.read_csv("predictions.csv")
    assert len(scored) == 300
    assert roc_auc_score(answers, scored["probability"]) > 0.85
    assert Path("schema.toml").read_text().count("role") >= 5
