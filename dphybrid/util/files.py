"""Atomic files and folders: written under a hidden temporary name, fsynced and renamed; then the parent
folder is fsynced.

A reader sees the old content or the new one. `clear_leftovers` removes the temporary files of killed
processes.
"""

import errno
import glob
import json
import os
import platform
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dphybrid.util.errors import UserError

_REMEDIES = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room within your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "its disk is read-only: make it writable, or name another folder in DPHYBRID_DATA_DIR",
    errno.EIO: "its disk fails: look at the system's log",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the system has too many open files: end what holds them",
}
_SMALL_BYTES = 2**24
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|removed|replaced)-\d+-[0-9a-f]+")


def given_path(text: str, name: str) -> Path:
    """Return a path that a person gave, with `~` as their home; perhaps there is nothing.

    Raises UserError for what can be no path here: too long, with a NUL, of a user who is not there, in a
    folder that is closed.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:  # no home; a NUL, or text that is not UTF-8
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{name}={text[:200]!r}: cannot be looked up ({why}); give another path") from error
    return path


def check_target(file: Path, what: str) -> None:
    """Raise UserError where no file can be written: its folder is not there, or it is one. what: the flag and
    its value, as given."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UserError(f"{what}: cannot be written there; name a file in a folder that exists")


def read_small_text(path: Path) -> str:
    """Return the text of a file that people write. Raises OSError, also for one that goes on beyond 16 MiB (a
    device, say), and UnicodeDecodeError."""
    with path.open("rb") as stream:
        content = stream.read(_SMALL_BYTES + 1)
    if len(content) > _SMALL_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {_SMALL_BYTES >> 20} MiB", str(path))
    return content.decode()


def temporary(path: Path, kind: str = "partial") -> Path:
    """Return a hidden name beside `path` that no other process or thread uses."""
    return path.with_name(f".{path.name}.{kind}-{os.getpid()}-{threading.get_ident():x}")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file at once and for good; where that fails, what was there before stays."""
    partial = temporary(path)
    try:
        with naming(path):
            with open(partial, "wb") as stream:
                stream.write(content)
                stream.flush()
                # before the rename: else a power loss may leave the name without its bytes
                os.fsync(stream.fileno())
            partial.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file at once and for good."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write a page of JSON at once and for good."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False))


def read_json(path: Path) -> Any:
    """Read a page of JSON. Raises UserError when it is not there, or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error


@contextmanager
def making(final: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `final`, complete and fsynced, when the block ends; nothing is left
    when the block fails.

    A folder `final` that is there already is replaced; a crash between the two renames leaves it to
    `clear_leftovers`, which brings it back.
    """
    partial, before = temporary(final), temporary(final, "replaced")
    try:
        with naming(final):
            shutil.rmtree(partial, ignore_errors=True)
            make_folder(final.parent)
            partial.mkdir()
            yield partial
            # In one order: `dphybrid selftest --seed` counts the operations.
            for path in (*sorted(partial.rglob("*")), partial):
                sync(path)
            # a folder cannot replace one that holds files, so it takes two renames
            if final.exists():
                final.rename(before)
            try:
                partial.rename(final)
            except OSError:
                if before.exists():
                    before.rename(final)
                raise
            sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, for good; one that is there stays as it is. mode: who may enter the
    folder itself."""
    # One by one: `mkdir(parents=True)` would leave the entries of those above unsynced.
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
        sync(folder.parent)


def own_folder(folder: Path) -> Path:
    """Return a folder that only this user can enter, made where it is missing. Raises UserError for one that
    is not this user's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder}: is a link or another user's; remove it: only this user may enter it")
    # One that was there has any mode.
    folder.chmod(0o700)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder: its name goes first, so that a crash leaves no half of it under that name."""
    with naming(folder):
        gone = temporary(folder, "removed")
        folder.rename(gone)
        sync(gone.parent)
    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in `parent` without links in its path; remove it when the block ends, and now those
    of processes that were killed. prefix: of their names.

    Raises UserError when `parent` cannot be written.
    """
    try:
        make_folder(parent, mode=0o700)
        prefix = f"{prefix}{platform.node()}-"  # processes of other machines may work in a shared folder
        for left in parent.glob(f"{glob.escape(prefix)}*"):
            pid = left.name.removeprefix(prefix).partition("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists():
                shutil.rmtree(left, ignore_errors=True)
        folder = TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(
            f"{parent}: cannot be written ({error.strerror}); make room there, or set DPHYBRID_DATA_DIR"
        ) from error
    with folder as name:
        yield Path(name).resolve()


def clear_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left in `folder` beside the files and folders (or the one called `name`);
    bring back a folder that was about to be replaced. Whoever calls this holds the lock of what is written
    there.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or name not in (None, match["name"]):
            continue
        with naming(path):
            if match["kind"] == "replaced" and not path.with_name(match["name"]).exists():
                path.rename(path.with_name(match["name"]))
                sync(folder)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def sync(path: Path) -> None:
    """Have the disk keep a file's bytes, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the system that name no file the name `path`: a write to a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def disk_errors_told(remedy: str = "") -> Iterator[None]:
    """Turn errors of the disk (full, read-only, failing, out of handles) into UserError with the file and a
    remedy; may decorate."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        what = f"{error.filename or 'a file'}: {error.strerror}; {_REMEDIES[error.errno]}"
        raise UserError(f"{what}{remedy and f', {remedy}'}") from error
