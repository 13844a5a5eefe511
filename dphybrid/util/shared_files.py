"""Files in folders that other users can write to: opened without following links or waiting, and looked at
before they are used."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_BYTES = 65536
_NO_FILE = {
    errno.ELOOP: "is a link",
    errno.EISDIR: "is a folder",
    errno.ENXIO: "is not a regular file",
    errno.EACCES: "is another user's and closed",
}


class OddFileError(OSError):
    """What stands at a path is not what belongs there; the message names the path and what it is."""


def open_regular(file: Path, flags: int = os.O_RDONLY, own: bool = False) -> int:
    """Open a regular file that no other name leads to; return its handle.

    own: it must belong to this user. Raises OddFileError for anything else that stands there, and OSError as
    `os.open` does.
    """
    try:
        # O_NONBLOCK: opening another user's FIFO would wait for a writer that never comes
        handle = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise OddFileError(f"{file}: {_NO_FILE[error.errno]}") from error
        raise
    facts = os.fstat(handle)
    why = ""
    if not stat.S_ISREG(facts.st_mode):
        why = "is not a regular file"
    elif facts.st_nlink > 1:
        why = f"has {facts.st_nlink} names"
    elif own and facts.st_uid != os.getuid():
        why = f"belongs to user {facts.st_uid}"
    if why:
        os.close(handle)
        raise OddFileError(f"{file}: {why}")
    return handle


@contextmanager
def opened(file: Path, flags: int = os.O_RDONLY, own: bool = False) -> Iterator[int]:
    """Yield the handle of `open_regular` while the block runs."""
    handle = open_regular(file, flags, own)
    try:
        yield handle
    finally:
        os.close(handle)


def write_page(handle: int, text: str) -> None:
    """Replace the text of an open file, which others may have open, too: it stays the same file."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def read_text(handle: int) -> str:
    """Return the text of an open file, up to `_MAX_BYTES`. Raises OddFileError for other bytes."""
    try:
        return os.pread(handle, _MAX_BYTES, 0).decode()
    except UnicodeDecodeError as error:
        raise OddFileError(f"is not text ({error.reason})") from error


def own_folder(folder: Path) -> Path:
    """Return a folder that only this user can enter, made where it is missing. Raises OddFileError for one
    that is not this user's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise OddFileError(f"{folder}: is not a folder")
    if facts.st_uid != os.getuid():
        raise OddFileError(f"{folder}: belongs to user {facts.st_uid}")
    if stat.S_IMODE(facts.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def shared_folder_fault(folder: Path) -> str | None:
    """Return why a folder is not safe to share with other users, or None: some of them could take away what
    others put there."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        return f"{folder} is not a folder"
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        return f"{folder} is not sticky, so everybody can remove what others put there"
    if facts.st_uid not in (0, os.getuid()):
        return f"{folder} belongs to user {facts.st_uid}, who can remove what others put there"
    return None
