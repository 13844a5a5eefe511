"""File locks (flock), which the kernel releases when their process ends, even by kill -9.

A holder may write into the locked file. To see whether a file is locked, a process takes a shared lock for a
moment: that needs read permission only, and two processes that look at once do not disturb each other.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of `os.open`: follow no link, and wait for nothing."""


class FileLock:
    """An exclusive lock on a file, which is made when it is not there and left as it is otherwise.

    temporary: the file goes when the lock is released. mode: of a new file.
    """

    def __init__(self, path: Path, temporary: bool = False, mode: int = 0o666) -> None:
        self.path, self._temporary, self._mode = path, temporary, mode
        self._handle: int | None = None

    def acquire(self, wait: bool = False) -> bool:
        """Take the lock; return False when another process or thread holds it and `wait` is not set. Never
        follows a symbolic link."""
        while self._handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | _NO_LINK, self._mode)
            try:
                if not lock(handle, wait):
                    return False
                # Else its last holder removed it: a newer one may be held by someone else.
                if stands_at(self.path, handle):
                    self._handle, handle = handle, -1
            finally:
                if handle >= 0:
                    os.close(handle)
        return True

    def release(self) -> None:
        """Give the lock back."""
        if self._handle is not None:
            if self._temporary:
                self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock on the temporary file `path` and hold it during the block."""
    held = FileLock(path, temporary=True)
    held.acquire(wait=True)
    try:
        yield
    finally:
        held.release()


def is_held(path: Path) -> bool:
    """Return whether some process or thread holds the lock on `path` now."""
    try:
        handle = os.open(path, os.O_RDONLY | _NO_LINK)
    except FileNotFoundError:
        return False
    try:
        return is_locked(handle)
    finally:
        os.close(handle)


def lock(handle: int, wait: bool = False) -> bool:
    """Lock an open file for this handle alone; return False when another handle has it and `wait` is not
    set."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(handle: int) -> bool:
    """Return whether another handle than this one has the lock on its file. While one looks, which takes
    microseconds, `lock` without waiting fails elsewhere."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def stands_at(path: Path, handle: int) -> bool:
    """Return whether the open file still has this name. One that was removed before it was locked has not:
    the next process would lock another."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False
