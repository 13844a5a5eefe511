"""Digests: of files, of parts together, and whether files still have theirs."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dphybrid.util.errors import UserError
from dphybrid.util.files import write_json

_PIECE_BYTES = 2**22


def file_digest(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return the sha256 of parts in hex; their borders count."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def value_digest(value: Any) -> str:
    """Return the sha256 in hex of a value that is fit for JSON; the order of names does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def copy_files(source: Path, target: Path) -> dict[str, str]:
    """Copy the files of a folder into a new one; return the sha256 in hex of what was read, by name."""
    target.mkdir()
    sums = {}
    for file in sorted(source.iterdir()):
        with file.open("rb") as stream, (target / file.name).open("wb") as copy:
            digest = hashlib.sha256()
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
                copy.write(piece)
        sums[file.name] = digest.hexdigest()
    return sums


def verify_files(folder: Path, sums: Mapping[str, str], remedy: str, known: bool = True) -> None:
    """Check that the files of `folder` have the sha256 in `sums` (by name below it). Raises UserError that
    names the first one that has not.

    known: files that were found whole before and have the same inode, size and time of change since are not
    read again.
    """
    before = _read(_verified(folder)) if known else {}
    found: dict[str, list[Any]] = {}
    for name, wanted in sums.items():
        file = folder / name
        with _told(file, remedy):
            mark = [*_stamp(file), wanted]
        if before.get(name) != mark:
            check_file(file, wanted, remedy)
        found[name] = mark
    if found != before:
        note_verified(folder, sums, found)


def check_file(file: Path, wanted: str, remedy: str, digest: Callable[[Path], str] = file_digest) -> None:
    """Raise UserError when a file has another sha256, or cannot be read. digest: reads it."""
    with _told(file, remedy):
        found = digest(file)
    if found != wanted:
        raise UserError(f"{file}: is damaged (its sha256 differs); {remedy}")


@contextmanager
def _told(file: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing; {remedy}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); {remedy}") from error


def note_verified(
    folder: Path, sums: Mapping[str, str], found: Mapping[str, list[Any]] | None = None
) -> None:
    """Remember beside `folder` that its files are whole, where that can be written: the next `verify_files`
    then reads none of them."""
    with suppress(OSError):
        marks = found or {name: [*_stamp(folder / name), wanted] for name, wanted in sums.items()}
        write_json(_verified(folder), marks)


def forget_verified(folder: Path) -> None:
    """Have the next `verify_files` read all files."""
    with suppress(OSError):
        _verified(folder).unlink(missing_ok=True)


def _verified(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.verified")


def _stamp(file: Path) -> tuple[int, int, int]:
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read(page: Path) -> dict[str, list[Any]]:
    try:
        value = json.loads(page.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
