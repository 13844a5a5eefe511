"""Without the extras: what needs neither Prefect nor MLflow works, and what needs one names it."""

import json
import os
from pathlib import Path

import pytest

from tests.commands import python
from tests.conftest import REPOSITORY

HIDE = """
import sys

HIDDEN = ("prefect", "mlflow", "fastapi", "optuna", "yaml")

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, *rest)

    def find_distributions(self, context):
        found = getattr(self.finder, "find_distributions", lambda _: ())(context)
        return [each for each in found if each.name.lower() not in HIDDEN]

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


@pytest.fixture
def light(tmp_path: Path, data_dir: Path) -> dict[str, str]:
    """The variables of a process in which the extras cannot be found."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDE)
    gone = {name: value for name, value in os.environ.items() if "TRACKING_URI" not in name}
    return gone | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(REPOSITORY)])}


NEEDING = {"ui": "mlflow", "worker": "flows", "deploy": "flows"}


def test_all_else_works_without_the_extras_and_what_needs_one_names_it(
    light: dict[str, str], data_dir: Path
) -> None:
    train = "train --recipe examples.own_recipe:Ratings --devices cpu*2 --data.num-ratings 1000"
    train += " --train.log-every 5 --train.epochs"
    program = (
        "import sys, dphybrid\nfrom dphybrid.cli.main import main\n"
        f"for words in ('{train} 1 --run-name light', '{train} 2 --resume light'):\n"
        "    assert main(words.split()) == 0; print('ended')\n"
        "rows = {'shop': ['a', 'b'] * 100, 'clicked': [1, 0] * 100}\n"
        "run = dphybrid.train(rows, label='clicked', devices='cpu', epochs=1, quiet=True)\n"
        "print('listed', len(run.predict(rows)), dphybrid.runs()[0].name == run.name, run.status)\n"
        f"for words in {list(NEEDING)}: print('code', main(words.split()), file=sys.stderr, flush=True)\n"
        "sys.exit(main(['doctor']))"
    )
    done = python("-c", program, env=light, timeout=300)
    told, run = done.stdout.partition("ended")[0], data_dir / "runs/light"
    assert told.count("pip install 'dphybrid[mlflow]'") == 1
    assert f"Report:      {run / 'Report.html'}" in told
    assert (run / "Report.html").is_file()
    rows = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    assert next(row for row in rows if row["op"] == "params")["values"]["train.epochs"] == "1"
    assert [row["status"] for row in rows if row["op"] == "status"] == ["FINISHED", "RUNNING", "FINISHED"]
    assert [row["step"] for row in rows if row["op"] == "metrics" and "valid/right" in row] == [15, 30]
    steps = [row["step"] for row in rows if row["op"] == "metrics" and "train/loss" in row]
    assert steps == [5, 10, 15, 20, 25, 30]
    assert "listed 200 True finished\n" in done.stdout
    *pages, rest = done.stderr.split("code 2\n")
    assert (len(pages), rest) == (len(NEEDING), "")
    for page, extra in zip(pages, NEEDING.values(), strict=True):
        assert f"pip install 'dphybrid[{extra}]'" in page
    assert "Prefect: not installed" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_flow_names_the_extra_that_it_needs(light: dict[str, str]) -> None:
    done = python("-m", "flows.train_hybrid", ends=1, env=light)
    assert "pip install 'dphybrid[flows]'" in done.stderr
