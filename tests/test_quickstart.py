"""The commands of the quarter of an hour, as the page has them, on a table as people have it."""

import csv
import re
import shlex
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from dphybrid.cli.main import main
from tests.conftest import REPOSITORY

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
def test_the_page_from_a_messy_table_to_predictions(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_visits(Path("visits.csv"), 1500, 0)
    answers = write_visits(Path("new.csv"), 300, 1)
    told = {}
    for program, *argv in map(shlex.split, commands(deployed=False)):
        assert program == "dphybrid"
        assert main(argv) == 0, (argv, capsys.readouterr().err)
        told[argv[0]] = capsys.readouterr().out
    assert list(told) == ["prepare", "plan", "init", "train", "compare", "predict"]
    assert re.search(r"tags +bag", told["train"])
    assert "Reusing prepared data" in told["train"]
    assert re.search(r"1,200 rows to train", told["plan"])
    assert "'user'" not in told["prepare"]
    assert {"first", "deep"} <= set(re.findall(r"\w+", told["compare"]))
    assert "deepfm" in told["compare"]
    scored = pl.read_csv("predictions.csv")
    assert len(scored) == 300
    assert roc_auc_score(answers, scored["probability"]) > 0.85
    assert Path("schema.toml").read_text().count("role") >= 5
