"""Files and folders survive a kill and a power loss at each operation: after a step its outcome is there,
within it the one before or its own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dphybrid.selftest.faults import KILLED, Faults
from dphybrid.util.files import clear_leftovers, making, remove_folder, write_text


def put(folder: Path, text: str) -> None:
    with making(folder) as partial:
        (partial / "in").mkdir()
        for name in ("x", "in/y"):
            (partial / name).write_text(text)


STEPS: list[tuple[Callable[[Path], None], Any]] = [
    (lambda root: write_text(root / "page", "one"), ("one", None)),
    (lambda root: write_text(root / "page", "two"), ("two", None)),
    (lambda root: put(root / "deep" / "folder", "one"), ("two", {"x": "one", "in/y": "one"})),
    (lambda root: put(root / "deep" / "folder", "two"), ("two", {"x": "two", "in/y": "two"})),
    (lambda root: remove_folder(root / "deep" / "folder"), ("two", None)),
    (lambda root: write_text(root / "page", "three"), ("three", None)),
]
OUTCOMES = [(None, None), *(outcome for _, outcome in STEPS)]


def broken(root: Path, target: int, mode: str) -> tuple[int, int]:
    """Take the steps in a process that is broken at an operation; return (steps done, exit code)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Faults(root, target, mode, seed=target).install()
            for step, _ in STEPS:
                step(root)
                os.write(writing, b".")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        done = len(pipe.read())
    return done, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def found(root: Path) -> Any:
    for folder in (root, root / "deep"):
        clear_leftovers(folder)
    page, folder = root / "page", root / "deep" / "folder"
    files = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    return page.read_text() if page.exists() else None, files if folder.exists() else None


@pytest.mark.parametrize("mode", ["kill", "torn", "unsynced", "lost"])
def test_what_is_done_is_there_and_what_is_not_is_no_half(tmp_path: Path, mode: str) -> None:
    code, target = KILLED, 0
    while code == KILLED:
        target += 1
        root = tmp_path / str(target)
        root.mkdir()
        done, code = broken(root, target, mode)
        outcome = found(root)
        assert outcome in OUTCOMES[done : done + 2], (
            f"operation {target}, {mode}: after {done} steps {outcome}"
        )
    assert (done, code) == (len(STEPS), 0)
    assert target > 30
