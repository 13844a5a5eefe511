"""Lines of a terminal have at most its width; files and pipes get them whole."""

import io
import sys
from pathlib import Path

import pytest

from dphybrid.cli.main import main
from dphybrid.util.text import folded
from tests.commands import command


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_folded_at_blanks_and_long_words_stay_whole() -> None:
    path = "/a/path/" + "long" * 20
    text = f"short\n  {'word ' * 9}end\nsee {path} there\n"
    assert folded(text, 40) == (
        f"short\n  word word word word word word word\n      word word end\nsee\n    {path}\n    there\n"
    )
    assert folded(text, 200) == text


def test_a_command_fits_80_columns_and_a_pipe_gets_whole_lines(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"2026-08-{1 + i % 28:02d} 10:00,u{i % 90},some words {i % 9},{i % 3 % 2}" for i in range(300)]
    (tmp_path / "x.csv").write_text("\n".join(["when,user,words,y", *rows]))
    argv = ["prepare", "--data.path", str(tmp_path / "x.csv"), "--data.label", "y", "--data.missing", "zz"]
    whole = command(*argv)
    assert max(map(len, whole.splitlines())) > 100
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert main(argv) == 0
    lines = terminal.getvalue().splitlines()
    drawn = [line for line in lines if "\x1b" not in line and "━" not in line]
    assert len(drawn) > 8
    (line,) = [line for line in drawn if len(line) > 80 and " " in line.strip()]
    assert line == whole.splitlines()[-1]  # a command stays whole, so that it can be copied
    assert line.startswith("  dphybrid train ")
