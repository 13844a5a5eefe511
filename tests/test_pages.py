"""Trainings that docs and examples show, in one table, and the quick start's commands as they stand."""

import re
import shlex
from pathlib import Path

import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from dphybrid.cli.main import main
from examples.visits import write
from tests.commands import run_with
from tests.conftest import REPOSITORY, SHARED

ADULT = SHARED / "data" / "adult" / "adult.data"
CLICKS = ["recipe=ctr", "data.path=clicks.csv", "data.label=clicked", "devices=cpu*2"]
CLICKS += ["train.batch_size=32", "train.epochs=20", "table.lr=0.02"]
TRAININGS = {
    "model.md": ([*CLICKS, "model.factory=page_model:Bilinear"], "auc", 0.95),
    "UCI Adult": (["recipe=ctr", f"data.path={ADULT}", "data.label=14", "train.epochs=1"], "auc", 0.9),
}
"""What is trained -> its values, the metric that it reaches, and the least of it."""


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
    code, *_ = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "page_model.py").write_text(code)
    rows = "\n".join(f"{'abcd'[i % 4]},{'xyz'[i % 3]},{i % 7},{int(i % 4 == 0)}" for i in range(400))
    Path("clicks.csv").write_text("one,two,number,clicked\n" + rows)
    report = run_with(*values)
    assert report.metrics[metric] >= least


def write_visits(num_rows: int, num_new: int) -> list[bool]:
    """Write the files of examples/visits.py with fewer rows; return the hidden answers."""
    write(num_rows, num_new)
    return (pl.read_csv("visits-answers.csv")["clicked"] == "yes").to_list()


def commands(deployed: bool) -> list[str]:
    """The lines of the page's commands: those at hand, or those that need a server."""
    page = (REPOSITORY / "docs/quickstart.md").read_text(encoding="utf-8")
    at_hand, served = page.split("## Deploy it")
    blocks = re.findall(r"^```sh\n(.*?)^```$", served if deployed else at_hand, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_from_a_messy_table_to_predictions(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for program, *argv in map(shlex.split, commands(deployed=False)):
        if program == "python":
            assert argv == ["../dphybrid/examples/visits.py"]
            answers = write_visits(1500, 300)
        else:
            assert program == "dphybrid"
            few = ["--train.epochs", "8"] if argv[0] == "train" and "--train.epochs" not in argv else []
            assert main([*argv, *few]) == 0, (argv, capsys.readouterr().err)
        told[argv[0]] = capsys.readouterr().out
    assert list(told)[1:] == ["prepare", "train", "compare", "predict", "evaluate"]
    assert re.search(r"price +numeric", told["prepare"])
    assert "Reusing prepared data" in told["train"]
    (named,) = re.findall(r"more lines about the data: (.*)", told["train"])
    assert re.search(r"tags +bag", Path(named).read_text())
    assert re.search(r"^Test: +auc 0\.\d+", told["train"], flags=re.MULTILINE)
    assert {"first", "deep", "dcn"} <= set(re.findall(r"\w+", told["compare"]))
    scored = pl.read_csv("predictions.csv")
    assert len(scored) == 300
    auc = roc_auc_score(answers, scored["probability"])
    assert auc > 0.55  # of 1,500 rows
    assert re.search(rf"auc .decides. +{auc:.4f}", told["evaluate"])
