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


def test_plan_shows_full_and_last_batch_and_idle_devices(
    capsys: pytest.CaptureFixture[str], data_dir: Path
) -> None:
    assert main(["plan", "--devices", "cpu*8", "--batch-size", "30", "--rows", "100"]) == 0
    shown = capsys.readouterr().out.replace(" ", "")
    assert "4,4,4,4,4,4,4,2" in shown
    assert "2,2,2,2,2" in shown
    assert "idle" in shown


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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "--recipe", "txt"], ["recipe", "'txt'", "'toy'"]),
        (["train", "--devices", "tpu"], ["devices", "'tpu'", "cpu*8"]),
        (["train", "--devices", "cuda:99"], ["cuda:99"]),
        (["train", "--train.batch-size", "-1"], ["train.batch_size", "'-1'", "at least"]),
        (["train", "--config", "nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["train", "--report", "no/such/folder/report.json"], ["--report", "folder that exists"]),
        (["prepare", "--recipe", "ctr", "--schema", "."], ["--schema .", "folder that exists"]),
        (["train", "--data.path", "nowhere.txt"], ["nowhere.txt"]),
        (["train", "--recipe", "ctr"], ["data.path"]),
        (
            ["train", "--model.factory", "no.such:thing", "--recipe", "toy"],
            ["model.factory", "no.such:thing"],
        ),
        (["train", "--recipe", "toy", "--resume"], ["--resume", "no such run of recipe toy"]),
        (["train", "--recipe", "toy", "--resume", ""], ["--resume ''", "names no run"]),
        (["train", "--epochs", "3"], ["--epochs", "did you mean --train.epochs", "--help"]),
        (["trian"], ["'trian'", "did you mean 'train'"]),
        (
            ["train", "--recipe", "digits", "--data.path", "no.csv"],
            ["--data.path", "recipe digits does not use it", "ctr"],
        ),
        (["train", "--recipe", "no.such:Thing"], ["no.such:Thing", "PYTHONPATH"]),
        (["plan", "--batch-size", "0", "--rows", "5"], ["--batch-size 0"]),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    argv: list[str], words: list[str], data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(argv)
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr().err
    assert code == 2
    assert told.startswith("error: ")
    for word in words:
        assert word in told.replace("greater than or equal to", "at least")
    leftovers = [
        path
        for path in data_dir.rglob("*")
        if path.is_dir() and path.parent.name in ("runs", "prepared") and "toy" not in path.name
    ]
    assert leftovers == []
