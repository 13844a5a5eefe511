"""The command as a person meets it: help, plans, wrong input, exit codes."""

import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

from dphybrid.__main__ import main as started
from dphybrid.cli.main import main, make_parser
from tests.conftest import REPOSITORY


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["train", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for word in (
        "--recipe toy --devices 'cpu*3'",
        "--train.batch-size",
        "--resume",
        "DPHYBRID_DATA_DIR",
        "Rows of a batch",
    ):
        assert word in shown


def test_ctrl_c_during_imports_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "dphybrid.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dphybrid.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert started() == 130


@pytest.mark.parametrize("flow", ["train_hybrid", "retrain_hybrid", "sweep_hybrid", "join_hybrid"])
def test_ctrl_c_during_the_imports_of_a_flow_ends_without_a_traceback(flow: str, tmp_path: Path) -> None:
    package = tmp_path / "prefect"
    package.mkdir()
    (package / "main.py").touch()
    (package / "__init__.py").write_text(  # the flow's own first import is that of a name
        "import os, signal\n\n\ndef __getattr__(name):\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    command = f"PYTHONPATH={tmp_path} {sys.executable} -m flows.{flow}; exit $?"
    ended = subprocess.run(["sh", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_plan_asks_the_recipe_for_its_sizes(
    capsys: pytest.CaptureFixture[str], data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sized.py").write_text(
        "from dphybrid.recipes.tutorial.recipe import Toy\n\n\nclass Mine(Toy):\n    name = 'mine'\n\n"
        "    def sized(self, config, num_rows, info):\n"
        "        train = config.train.model_copy(update={'batch_size': num_rows // info['num_inputs']})\n"
        "        return config.model_copy(update={'train': train}), []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plan", "--recipe", "sized:Mine", "--devices", "cpu*2"]) == 0
    assert "10,10" in capsys.readouterr().out.replace(" ", "")
