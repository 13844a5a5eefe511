"""The command that breaks small runs on the user's own disk."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dphybrid.cli.main import main
from dphybrid.selftest import promises
from dphybrid.selftest.promises import Promise, table
from tests.reliability.test_damage import DAMAGES


@pytest.mark.slow
def test_selftest_tries_every_promise_and_leaves_the_data_folder_as_it_was(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir.mkdir()
    (data_dir / "mine.txt").write_text("mine")
    (data_dir / f".selftest-{2**22 + 1}-killed").mkdir()  # no process has such a number
    (data_dir / f".selftest-{os.getpid()}-other").mkdir()
    assert main(["selftest", "--minutes", "0.1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    tried = sum(int(number) for number in re.findall(r"\| (\d+) +\| kept", "\n".join(rows)))
    assert tried >= 1, rows
    assert {path.name for path in data_dir.iterdir()} == {"mine.txt", f".selftest-{os.getpid()}-other"}
    assert (data_dir / "mine.txt").read_text() == "mine"


def promise(name: str, *complaints: str) -> Promise:
    trials: list[Callable[[], str]] = [lambda text=text: text for text in complaints]
    return Promise(name, "somehow", "nothing", iter(trials))


def test_a_broken_promise_is_told_and_ends_with_1(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [promise("fire", "", "", ""), promise("flood", "", "the cellar is full"), promise("frogs")]
    monkeypatch.setattr(promises, "promises_of", lambda *_: given)
    monkeypatch.setattr(promises, "QUIET_S", -1.0)
    assert main(["selftest"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN flood: the cellar is full" in out
    assert "5 tried, 1 broken; up to 1 min more" in out
    cells = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if line.startswith("|")]
    assert [(row[1], row[4], row[5]) for row in cells[2:]] == [
        ("fire", "3", "kept"),
        ("flood", "2", "BROKEN 1 times"),
        ("frogs", "0", "not tried"),
    ]
    assert list(data_dir.iterdir()) == []


def test_a_wrong_time_and_a_folder_that_cannot_be_written_are_told(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["selftest", "--minutes", "0"]) == 2
    assert "--minutes 0.0: give how many minutes" in capsys.readouterr().err
    monkeypatch.setenv("DPHYBRID_DATA_DIR", "/proc/nothing")
    assert main(["selftest"]) == 2
    assert "/proc/nothing: cannot be written" in capsys.readouterr().err


def test_damages_damage() -> None:
    content = bytes(range(200))
    for damage in DAMAGES.values():
        assert damage(content, 0.4) != content
    assert table([]).count("\n") == 1
