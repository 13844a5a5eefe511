"""Atomic files and folders: each is written under a hidden name beside it, fsynced and renamed, then its
parent folder is fsynced.

A reader sees either the old or the new content. A lock, which the kernel ends with its process, keeps writers
apart, so that the next one removes what a killed one left.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dphybrid.util.errors import UserError
from dphybrid.util.locks import is_held, locked

_REMEDIES = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room within your quota",
    errno.EFBIG: "raise ulimit -f",
    errno.EROFS: "name another folder in DPHYBRID_DATA_DIR",
    errno.EIO: "its disk fails: look at the system's log",
    errno.EMFILE: "raise ulimit -n",
    errno.ENOLCK: "its file system has no file locks: name a folder on a local disk",
}


def given_path(text: str, name: str) -> Path:
    """Return the path that a user typed, with `~` expanded. It need not exist.

    Raises UserError if it cannot be looked up: empty, too long, with a NUL, `~` of an unknown user, or in a
    folder without permission; and if it is not UTF-8. name: the field, for the message.
    """
    if not text:  # to Path, the working folder
        raise UserError(f"{name}='': is empty; give a path")
    try:
        text.encode()
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    # RuntimeError: expanduser found no home. ValueError: a NUL, or a name that is not UTF-8, which JSON,
    # terminals and MLflow do not take.
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{name}={text[:200]!a}: cannot be looked up ({why}); give another path") from error
    return path


def no_such_file(path: str, field: str) -> UserError:
    """Return the error for a path to read that does not exist."""
    return UserError(f"{field}={path}: there is no such file")


def check_target(file: str | Path, what: str) -> Path:
    """Return the path of a file to write, as `given_path` does. Raises UserError if it is a folder, or if its
    parent folder does not exist or cannot be written. what: the flag and its value, as given."""
    target = given_path(str(file), what.partition(" ")[0])
    folder = target.absolute().parent
    if target.is_dir() or not folder.is_dir():
        raise UserError(f"{what}: cannot be written there; name a file in a folder that exists")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{what}: you may not write in {folder}; name a file in another folder")
    return target


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield the hidden path `.NAME.partial` beside `path`, under which this thread alone writes it; others
    wait. Removes what a killed process left there, and what is there at the end of the block."""
    partial = path.with_name(f".{path.name}.partial")
    with naming(path), locked(path.with_name(f".{path.name}.lock")):
        _delete(partial)
        try:
            yield partial
        finally:
            with suppress(OSError):
                _delete(partial)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)  # raises for another user's, such as a link in a folder for all


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path for a new file, which is fsynced and renamed to `path` when the block ends. If that
    fails, the old content stays."""
    with writing(path) as partial:
        yield partial
        # Before the rename: otherwise a power loss may leave the new name with missing bytes.
        sync(partial)
        partial.replace(path)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically and durably."""
    with replacing(path) as partial:
        partial.write_bytes(text.encode())


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, atomically and durably."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False))


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError if it is missing or cannot be parsed."""
    try:
        # RecursionError: nested brackets by the thousand.
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error


@contextmanager
def making(final: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that is fsynced and renamed to `final` when the block ends. If the block fails,
    the folder is removed. Others that make the same folder wait.

    Raises FileExistsError if `final` exists by then. replace: replace such a folder. If a crash then happens
    between the two renames, `clear_leftovers` restores it.
    """
    before = final.with_name(f".{final.name}.replaced")
    with naming(final):
        make_folder(final.parent)
    with writing(final) as partial:
        if final.exists() and not replace:
            raise FileExistsError(errno.EEXIST, "exists already", str(final))
        partial.mkdir()
        yield partial
        # In a fixed order, so that the tests of faults can repeat one by its number.
        for path in (*sorted(partial.rglob("*")), partial):
            sync(path)
        if replace and final.exists():
            _delete(before)
            final.rename(before)
        # rename() replaces a folder only if it is empty.
        partial.rename(final)
        sync(final.parent)
        _delete(before)


PRIVATE = set[Path]()
"""Folders that `make_folder` gives mode 700. An existing folder keeps its permissions."""


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, durably. An existing folder is left as it is."""
    # Parents one by one: `mkdir(parents=True)` would leave their directory entries unsynced.
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(0o700 if folder in PRIVATE else 0o777, exist_ok=True)
        sync(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a crash never leaves half of it under its name."""
    with writing(folder) as renamed:
        folder.rename(renamed)
        sync(folder.parent)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed processes left in `folder`; restore a folder whose replacement was interrupted."""
    for left in sorted(folder.glob(".*.*")):
        match = re.fullmatch(r"\.(.+)\.(partial|lock|replaced)", left.name)
        if match is None or is_held(folder / f".{match[1]}.lock"):
            continue
        if match[2] == "replaced" and not (folder / match[1]).exists():
            left.rename(folder / match[1])
            sync(folder)
        else:
            _delete(left)


def sync(path: Path) -> None:
    """fsync a file's bytes, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name `path` to an OSError of the block that has none, such as a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def disk_text(error: OSError) -> str:
    """Return the message of a file's error: file, reason, and the remedy for this reason."""
    denied = isinstance(error, PermissionError)
    remedy = "name a folder that you may write" if denied else _REMEDIES.get(error.errno or 0)
    return f"{error.filename or 'a file'}: {error.strerror or error}{(remedy and f'; {remedy}') or ''}"


@contextmanager
def disk_errors_told(remedy: str = "") -> Iterator[None]:
    """Turn an OSError of the disk (full, read-only, failing, out of handles) into UserError with the file and
    a remedy. Also works as a decorator. remedy: added to the message."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        raise UserError(f"{disk_text(error)}{remedy and f', {remedy}'}") from error
