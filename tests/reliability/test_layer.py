"""The layer of faults sees what it should."""

from pathlib import Path

import pytest

from tests.commands import python

WRITING = """
import os, sys
from pathlib import Path
from tests.reliability.faults import Faults
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
