"""The journals of a folder: of all runs of a store that something waits for, or was set aside from."""

import contextlib
from pathlib import Path

from dphybrid.tracking.journal import Journal


def journals(folder: Path) -> list[Journal]:
    """Return the journals of a folder that hold records, oldest first."""
    found = {
        path.name.removesuffix(suffix): path
        for suffix in (".count", ".jsonl")
        for path in _named(folder, suffix)
    }
    return [
        Journal(folder, run_id)
        for run_id, path in sorted(found.items(), key=lambda item: item[1].stat().st_mtime)
    ]


def set_aside(folder: Path) -> list[Journal]:
    """Return the journals of a folder with records that were set aside."""
    return [
        Journal(folder, path.name.removesuffix(".refused.jsonl"))
        for path in sorted(folder.glob("*.refused.jsonl"))
    ]


def waiting(folder: Path) -> int:
    """Return how many runs of a folder hold records that nobody is sending."""
    count = 0
    for journal in journals(folder):
        with contextlib.suppress(OSError):
            if journal.pending(1) and journal.hold():
                journal.release()
                count += 1
    return count


def _named(folder: Path, suffix: str) -> list[Path]:
    return [
        path
        for path in folder.glob(f"*{suffix}")
        if not path.name.endswith(".refused.jsonl") and path.name[0] != "."
    ]
