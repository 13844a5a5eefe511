"""Break steps that write and remove files, at each operation: `python -m tests.util.crashing FOLDER MODE`.

A separate program, because it forks often: forking a small process takes milliseconds.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dphybrid.util.files import clear_leftovers, making, remove_folder, write_text
from tests.reliability.faults import KILLED, Faults


def put(folder: Path, text: str) -> None:
    with making(folder, replace=True) as partial:
        (partial / "in").mkdir()
        for name in ("x", "in/y"):
            (partial / name).write_text(text)


STEPS: list[tuple[Callable[[Path], None], Any]] = [
    (lambda root: write_text(root / "page", "one"), ["one", None]),
    (lambda root: write_text(root / "page", "two"), ["two", None]),
    (lambda root: put(root / "deep" / "folder", "one"), ["two", {"x": "one", "in/y": "one"}]),
    (lambda root: put(root / "deep" / "folder", "two"), ["two", {"x": "two", "in/y": "two"}]),
    (lambda root: remove_folder(root / "deep" / "folder"), ["two", None]),
    (lambda root: write_text(root / "page", "three"), ["three", None]),
]


def broken(root: Path, target: int, mode: str) -> tuple[int, int]:
    """Take the steps in a fork that breaks at operation `target`; return (steps done, exit code)."""
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


def main(folder: Path, mode: str) -> None:
    """Print, as JSON, (steps done, exit code, files found) for a break at each operation, last for none."""
    trials: list[tuple[int, int, Any]] = []
    while not trials or trials[-1][1] == KILLED:
        root = folder / str(len(trials) + 1)
        root.mkdir()
        trials.append((*broken(root, len(trials) + 1, mode), found(root)))
    print(json.dumps(trials))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
