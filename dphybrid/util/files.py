"""Atomic files and folders: each is written under a hidden temporary name, fsynced and renamed, then its
parent folder is fsynced.

A reader sees either the old or the new content. `clear_leftovers` removes temporary files of killed
processes.
"""

import errno
import itertools
import json
import os
import pwd
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from dphybrid.util.alive import NAME, lives, process_name
from dphybrid.util.errors import UserError
from dphybrid.util.locks import locked

_REMEDIES = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room within your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "its disk is read-only: make it writable, or name another folder in DPHYBRID_DATA_DIR",
    errno.EIO: "its disk fails: look at the system's log",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOLCK: "its file system has no file locks: name a folder on a local disk",
}
"""Remedies for the disk's errors."""
_SMALL_BYTES = 2**24
# What `temporary` gives: .NAME.KIND-NUMBER-PROCESS
_LEFTOVER = re.compile(rf"\.(.+)\.(partial|removed|replaced|scratch)-[0-9a-f]+-({NAME.pattern})")
_SCRATCH = "scratch"
_NUMBERS = itertools.count(1)


def given_path(text: str, name: str) -> Path:
    """Return the path that a user typed, with `~` expanded. It need not exist.

    Raises UserError if it cannot be looked up: empty, too long, with a NUL, `~` of an unknown user, or in a
    folder without permission; and if it is not UTF-8. name: the field, for the message.
    """
    if not text:  # to Path, the working folder
        raise UserError(f"{name}='': is empty; give a path")
    try:
        text.encode()
    # Python represents other bytes in file names by lone surrogates, which neither JSON files nor terminals
    # nor MLflow take.
    except UnicodeEncodeError as error:
        raise UserError(f"{name}={text[:200]!a}: the name is not UTF-8; rename the file") from error
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    # RuntimeError: expanduser found no home. ValueError: a NUL.
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{name}={text[:200]!r}: cannot be looked up ({why}); give another path") from error
    return path


def no_such_file(path: str, field: str) -> UserError:
    """Return the error for a path to read that does not exist, with the name beside it that was probably
    meant."""
    folder, near = given_path(path, field).parent, list[str]()
    with suppress(OSError):
        near = get_close_matches(Path(path).name, [file.name for file in folder.iterdir()], 1)
    meant = f"; did you mean {str(Path(path).with_name(near[0]))!r}?" if near else ""
    return UserError(f"{field}={path}: there is no such file{meant}")


def check_target(file: str | Path, what: str) -> Path:
    """Return the path of a file to write, as `given_path` does. Raises UserError if it is a folder, or if its
    parent folder does not exist or cannot be written. Removes what killed processes left there. what: the
    flag and its value, as given."""
    target = given_path(str(file), what.partition(" ")[0])
    folder = target.absolute().parent
    if target.is_dir() or not folder.is_dir():
        raise UserError(f"{what}: cannot be written there; name a file in a folder that exists")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{what}: you may not write in {folder}; name a file in another folder")
    clear_leftovers(folder, alone=False)
    return target


def read_own_text(path: Path) -> str:
    """Return the text of a file that is safe to obey: a regular one of this user or root, which not every
    user may write. Raises UserError for another one, OSError, UnicodeDecodeError."""
    # Opened first, as the name can lead to another file a moment later; a pipe without a writer would block.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as stream:
        # A link's owner chooses its target, so the link is checked as well.
        link, file = path.lstat(), os.fstat(handle)
        fault = "it is not a regular file" if not stat.S_ISREG(file.st_mode) else ""
        if file.st_mode & stat.S_IWOTH:
            fault = "every user may write it (chmod o-w forbids that)"
        for owner in {link.st_uid, file.st_uid} - {0, os.getuid()}:
            fault = f"it belongs to user {user_name(owner)}; remove it, or work in a folder of your own"
        if not fault:
            return _small(stream, path).decode()
    raise UserError(f"{path.absolute()} is ignored: {fault}")


def user_name(number: int) -> str:
    """Return a user's name, or the number of one without a name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def read_small_text(path: Path) -> str:
    """Return the text of a file written by hand. Raises OSError, also for more than 16 MiB, and
    UnicodeDecodeError."""
    with path.open("rb") as stream:
        return _small(stream, path).decode()


def _small(stream: IO[bytes], path: Path) -> bytes:
    # One byte more than allowed instead of stat(): a device such as /dev/zero has no size, and never ends.
    content = stream.read(_SMALL_BYTES + 1)
    if len(content) > _SMALL_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {_SMALL_BYTES >> 20} MiB", str(path))
    return content


def temporary(path: Path, kind: str = "partial") -> Path:
    """Return a hidden path in the same folder that no other process or thread uses."""
    return path.with_name(f".{path.name}.{kind}-{next(_NUMBERS):x}-{process_name()}")


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically and durably. If that fails, the old content stays. mode: less the umask."""
    partial = temporary(path)
    try:
        with naming(path):
            with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
                stream.write(content)
                stream.flush()
                # Before the rename: otherwise a power loss may leave the new name with missing bytes.
                os.fsync(stream.fileno())
            partial.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically and durably."""
    write_bytes(path, text.encode())


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
    the folder is removed.

    Raises FileExistsError when `final` has files by then, whoever made it; these stay as they are. replace:
    replace such a folder. If a crash then happens between the two renames, `clear_leftovers` restores it.
    """
    partial, before = temporary(final), temporary(final, "replaced")
    try:
        with naming(final):
            make_folder(final.parent)
            partial.mkdir()
            yield partial
            # In a fixed order, so that the tests of faults can repeat one by its number.
            for path in (*sorted(partial.rglob("*")), partial):
                sync(path)
            if replace and final.exists():
                final.rename(before)
            try:
                # One step: rename() replaces a folder only if it is empty.
                partial.rename(final)
            except OSError as error:
                if before.exists():
                    before.rename(final)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise FileExistsError(errno.EEXIST, "exists already", str(final)) from error
                raise
            sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def making_once(final: Path) -> Iterator[Path | None]:
    """As `making`, but one process at a time, and the others wait: yields None if `final` exists by then."""
    make_folder(final.parent)
    with locked(final.with_name(f".{final.name}.lock")):
        # Only the holder of the lock makes it, so that any partial folder is a killed process's.
        clear_leftovers(final.parent, final.name)
        if final.exists():
            yield None
        else:
            with making(final) as partial:
                yield partial


_PRIVATE = set[Path]()


def keep_private(folder: Path) -> None:
    """Note that `make_folder` gives `folder` mode 700. An existing folder keeps its permissions."""
    _PRIVATE.add(folder)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, durably. An existing folder is left as it is."""
    # Parents one by one: `mkdir(parents=True)` would leave their directory entries unsynced.
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(0o700 if folder in _PRIVATE else 0o777, exist_ok=True)
        sync(folder.parent)


def own_folder(folder: Path) -> Path:
    """Return a folder that only this user can enter; make it if it is missing. Raises UserError if it belongs
    to another user or is a link."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder}: is a link or another user's; remove it: only this user may enter it")
    # An existing folder may have any mode.
    folder.chmod(0o700)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a crash never leaves half of it under its name."""
    with naming(folder):
        renamed = temporary(folder, "removed")
        folder.rename(renamed)
        sync(renamed.parent)
    shutil.rmtree(renamed, ignore_errors=True)


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new hidden folder in `parent`, as a path without symbolic links; remove it when the block ends.
    First remove those of this name that killed processes of this machine left.
    """
    folder = temporary(parent / name, _SCRATCH)
    with naming(parent):
        make_folder(parent)
        clear_leftovers(parent, name, alone=False)
        folder.mkdir(mode=0o700)
    try:
        yield folder.resolve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(folder: Path, name: str | None = None, alone: bool = True) -> None:
    """Remove temporary files and folders that killed processes left in `folder`, and restore a folder whose
    replacement was interrupted. name: only those of this file or folder. alone: the caller holds the lock of
    what is written there, so that no process is still writing; if not, only what processes of this machine
    left that no longer exist. Leaves what another user owns.
    """
    names = list[str]()
    with suppress(OSError):  # missing, or not for this user to read
        names = os.listdir(folder)
    for left in sorted(names):
        match = _LEFTOVER.fullmatch(left)
        if match is None or name not in (None, match[1]):
            continue
        locked_here = alone and match[2] != _SCRATCH  # a scratch folder is its process's alone
        if not locked_here and lives(match[3]) is not False:
            continue
        path, final = folder / left, folder / match[1]
        if match[2] == "replaced" and not final.exists():
            with naming(path):
                path.rename(final)
                sync(folder)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


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
