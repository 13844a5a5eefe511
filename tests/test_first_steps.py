"""What a person types first: help, wrong input; and Ctrl-C during imports."""

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dphybrid.cli.main import command_of, main
from dphybrid.config import flatten
from dphybrid.recipes.configs import build_config, given_values, load_config
from dphybrid.recipes.registry import BUILT_IN, find_recipe
from dphybrid.util.text import as_flags, flag_text
from tests.commands import command, python
from tests.conftest import REPOSITORY


def test_a_terminal_without_the_characters_of_a_name_shows_them_escaped(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(f"{n % 7},{n % 2}\n" for n in range(60))
    Path("t.csv").write_text("größe,y\n" + rows, encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", shown := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        assert main(["prepare", "--data.path", "t.csv", "--data.label", "y"]) == 0
    assert rb"gr\xf6\xdfe" in shown.buffer.getvalue()


def test_the_help_of_training_lists_recipes_and_a_tables_flags() -> None:
    told = command("train", "--help")
    for recipe in BUILT_IN:
        assert f"{recipe} {find_recipe(recipe).summary}" in " ".join(told.split())
    assert told.index("retrieval") < told.index("Column to predict")
    assert "The flags below are ctr's" in told
    told = command("train", "--help", "--recipe", "text")
    assert "The flags below are text's" in told
    assert "Column to predict" not in told


@pytest.mark.parametrize("names", [("a,b", "c"), ("a", "b"), (" a",), ("[1]",), ("[a", "b]"), ('["x"]',), ()])
def test_a_list_of_odd_names_is_read_back_from_flags(names: tuple[str, ...]) -> None:
    config = build_config({"recipe": "ctr", "data": {"path": "x.csv", "label": "y", "ignore": names}})
    typed = [f"{name}={flag_text(value)}" for name, value in flatten(given_values(config)).items()]
    assert load_config(None, typed) == config


def test_printed_flags_are_read_back() -> None:
    given = {"data.path": "a b.csv", "data.label": "-y"}
    read = command_of(["train", *shlex.split(as_flags(given))])
    assert flatten(read.values) == given


LABEL = "--data.label y"
WRONG = {
    "": "",
    "--help": "",
    "train --epochs 3": "--epochs: there is no such flag",
    "train --data.path nowhere.txt": "data.path=nowhere.txt: there is no such file",
    "train --recipe ctr": "data.path",
    "train --recipe ctr --data.path ok.csv": "data.label is not set",
    "predict run --data.path nowhere.csv --out y.csv": "data.path=nowhere.csv: there is no such file",
    f"prepare --recipe ctr --data.path nowhere.csv {LABEL}": "data.path",
    f"train --data.path empty.csv {LABEL}": "data.path",
    f"train --data.path . {LABEL}": "data.path",
    f"train --data.path ok.csv {LABEL} --resume nobody": "--resume nobody: there is no such run",
    f"prepare --data.path ok.csv {LABEL}": "",
}
"""Command -> how its error begins; only ctr's kinds of columns, in those from the fifth on, need polars. The
last one does its work."""


def test_help_and_what_is_wrong_import_nothing_heavy(tmp_path: Path, data_dir: Path) -> None:
    """They answer soon: they need neither torch nor servers. Nor does preparing data."""
    (tmp_path / "empty.csv").touch()
    (tmp_path / "ok.csv").write_text("a,y\n" + "".join(f"{i % 7},{i % 2}\n" for i in range(60)))
    program = (
        "import sys\nfrom dphybrid.cli.main import main\n"
        f"for command in {list(WRONG)}:\n"
        "  try: code = main(command.split())\n  except SystemExit as end: code = end.code\n"
        "  heavy = [m for m in ('torch', 'mlflow', 'prefect', 'rich', 'polars') if m in sys.modules]\n"
        "  print('ended', code, *heavy, file=sys.stderr, flush=True)\n"
    )
    told = python("-c", program, cwd=tmp_path).stderr
    pages = re.split(r"^(ended .*)\n", told, flags=re.MULTILINE)
    for number, (words, page, ended) in enumerate(zip(WRONG.values(), pages[::2], pages[1::2], strict=False)):
        assert (f"error: {words}" in page) == bool(words), page
        code, *heavy = ended.split()[1:]
        assert code == ("2" if words else "0")
        shown = ["rich"] if number == len(WRONG) - 1 else []  # its progress bar
        assert heavy == [] or (number >= 4 and heavy == [*shown, "polars"]), (words, heavy)
    assert len(pages) == 2 * len(WRONG) + 1


def test_ctrl_c_during_the_imports_of_a_flow_ends_without_a_traceback(tmp_path: Path) -> None:
    package = tmp_path / "prefect"
    package.mkdir()
    (package / "main.py").touch()
    (package / "settings.py").write_text("def get_current_settings(): ...\n")
    (package / "__init__.py").write_text(  # the flow's own first import is that of a name
        "import os, signal\n\n\ndef __getattr__(name):\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    line = f"PYTHONPATH={tmp_path} {sys.executable} -m flows.train_hybrid; exit $?"
    ended = subprocess.run(["sh", "-c", line], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "")
