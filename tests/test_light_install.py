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


def ran(light: dict[str, str], *argv: str, code: int = 0) -> str:
    done = python(*argv, ends=None, env=light, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_is_recorded_in_files_and_goes_on_there(light: dict[str, str], data_dir: Path) -> None:
    train = "train --recipe examples.own_recipe:Ratings --devices cpu*2 --data.num-ratings 1000"
    train += " --train.log-every 5 --train.epochs"
    program = (
        "from dphybrid.cli.main import main\n"
        f"for words in ('{train} 1 --run-name light', '{train} 2 --resume light'):\n"
        "    assert main(words.split()) == 0; print('ended')"
    )
    told = ran(light, "-c", program).partition("ended")[0]
    assert told.count("pip install 'dphybrid[mlflow]'") == 1
    run = data_dir / "runs/light"
    rows = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    assert next(row for row in rows if row["op"] == "params")["values"]["train.epochs"] == "1"
    assert [row["status"] for row in rows if row["op"] == "status"] == ["FINISHED", "RUNNING", "FINISHED"]
    assert (run / "Report.html").is_file()
    assert f"Report:      {run / 'Report.html'}" in told
    assert [row["step"] for row in rows if row["op"] == "metrics" and "valid/right" in row] == [15, 30]
    assert [row["step"] for row in rows if row["op"] == "metrics" and "train/loss" in row] == [
        5,
        10,
        15,
        20,
        25,
        30,
    ]


def test_python_trains_predicts_and_lists_runs(light: dict[str, str]) -> None:
    program = (
        "import dphybrid; rows = {'shop': ['a', 'b'] * 100, 'clicked': [1, 0] * 100}; "
        "run = dphybrid.train(rows, label='clicked', devices='cpu', epochs=1, quiet=True); "
        "print(len(run.predict(rows)), dphybrid.runs()[0].name == run.name, run.status)"
    )
    assert ran(light, "-c", program).strip().splitlines()[-1] == "200 True finished"


NEEDING = {
    "ui": "mlflow",
    "worker": "flows",
    "deploy": "flows",
}


def test_commands_name_the_extra_that_they_need_and_the_doctor_is_content(light: dict[str, str]) -> None:
    program = (
        "import sys; from dphybrid.cli.main import main\n"
        f"for words in {list(NEEDING)}: print('code', main(words.split()), file=sys.stderr, flush=True)\n"
        "sys.exit(main(['doctor']))"
    )
    told = ran(light, "-c", program)
    *pages, rest = told.split("code 2\n")
    assert (len(pages), rest) == (len(NEEDING), "")
    for page, extra in zip(pages, NEEDING.values(), strict=True):
        assert f"pip install 'dphybrid[{extra}]'" in page
    assert "Prefect: not installed" in told
    assert "Traceback" not in told


def test_a_flow_names_the_extra_that_it_needs(light: dict[str, str]) -> None:
    assert "pip install 'dphybrid[flows]'" in ran(light, "-m", "flows.train_hybrid", code=1)
