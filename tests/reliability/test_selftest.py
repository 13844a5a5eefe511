"""The command that breaks small runs on the user's own disk, and its layer of faults."""

import os
import platform
import random
import re
from pathlib import Path

import pytest

from dphybrid.cli.main import main
from dphybrid.selftest import trials
from tests.commands import command, python
from tests.conftest import LONG


@pytest.mark.slow
def test_selftest_tries_every_kind_of_fault_and_leaves_the_data_folder_as_it_was(
    data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    data_dir.symlink_to(tmp_path / "disk")
    (data_dir / "mine.txt").write_text("mine")
    (data_dir / f".selftest-{platform.node()}-{2**22 + 1}-killed").mkdir()  # no process has such a number
    (data_dir / f".selftest-{platform.node()}-{os.getpid()}-other").mkdir()
    shown = command("selftest", "--trials", "5" if LONG else "1")
    assert re.match(r"--seed \d+ repeats these trials", shown)
    rows = [line for line in shown.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 4
    assert all(re.search(r"\| \d+ +\| fails in at most (46|95) % of cases", row) for row in rows), rows
    assert {path.name for path in data_dir.iterdir()} == {
        "mine.txt",
        f".selftest-{platform.node()}-{os.getpid()}-other",
    }
    assert (data_dir / "mine.txt").read_text() == "mine"


def test_a_failed_trial_is_shown_and_ends_with_1(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints = iter(["", "", "", "", "", "", "the names are lost", ""])

    class Given(trials.Trials):
        def once(self, modes: tuple[str, ...], chosen: random.Random) -> str:
            return next(complaints, "")

    monkeypatch.setattr(trials, "Trials", Given)
    monkeypatch.setattr(trials, "QUIET_S", -1.0)
    out = command("selftest", "--trials", "3", ends=1)
    assert "BROKEN power loss: the names are lost" in out
    assert "7 trials, 1 failed" in out
    cells = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if line.startswith("|")]
    assert [(row[1], row[3], row[4]) for row in cells[2:]] == [
        ("killed at any moment", "3", "fails in at most 64 % of cases"),  # 0.37 ** 3 = 0.05
        ("killed at an operation", "3", "fails in at most 64 % of cases"),
        ("power loss", "3", "BROKEN 1 times"),
        ("disk full", "3", "fails in at most 64 % of cases"),
    ]
    assert list(data_dir.iterdir()) == []


def test_a_wrong_time_and_a_folder_that_cannot_be_written_are_told(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--minutes -1.0: give how many minutes" in command("selftest", "--minutes", "-1", ends=2)
    with pytest.raises(SystemExit, match="2"):
        main(["selftest", "--trials", "0"])
    monkeypatch.setenv("DPHYBRID_DATA_DIR", "/proc/nothing")
    assert "/proc/nothing: cannot be written" in command("selftest", ends=2)


WRITING = """
import os, sys
from pathlib import Path
from dphybrid.selftest.faults import Faults
from dphybrid.util import files

root, dropped = Path(sys.argv[1]), sys.argv[2]
faults = Faults(root)
faults.install()
real = os.fsync

def fsync(handle):
    kind = "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"
    return None if kind == dropped else real(handle)

os.fsync = fsync
files.write_text(root / "page.txt", "words")
print(faults.unsafe())
"""


@pytest.mark.parametrize(
    ("dropped", "unsafe"), [("", "[]"), ("file", "['page.txt']"), ("folder", "['page.txt']")]
)
def test_a_dropped_fsync_is_noticed(tmp_path: Path, dropped: str, unsafe: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    done = python("-c", WRITING, str(root), dropped)
    assert done.stdout.strip() == unsafe
