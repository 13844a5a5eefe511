"""File locks (flock). The kernel releases them when their process ends, even by kill -9.

The holder may write into the locked file. To test whether a file is locked, a process takes a shared lock for
a moment: this needs only read permission, and two processes that test at once do not disturb each other.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of `os.open`: do not follow a symbolic link, and do not wait for the other end of a pipe."""


class FileLock:
    """An exclusive lock on a file. A missing file is created; the content of an existing one is not changed.

    temporary: remove the file when the lock is released.
    """

    def __init__(self, path: Path, temporary: bool = False) -> None:
        self.path, self._temporary = path, temporary
        self._handle: int | None = None

    def acquire(self, wait: bool = False) -> bool:
        """Take the lock; return whether that worked. Without `wait` it fails if another process or thread
        holds the lock. Never follows a symbolic link."""
        while self._handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
            try:
                if not lock(handle, wait):
                    return False
                if _stands_at(self.path, handle):
                    self._handle, handle = handle, -1
            finally:
                if handle >= 0:
                    os.close(handle)
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._handle is not None:
            # While the lock is still held: afterwards the file may already be another process's lock.
            if self._temporary:
                self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None


def _stands_at(path: Path, handle: int) -> bool:
    """Return whether `path` still names the open file. If the last holder removed the file before it was
    locked here, the next process creates and locks another one."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock on `path`, hold it during the block, then remove the file."""
    held = FileLock(path, temporary=True)
    held.acquire(wait=True)
    try:
        yield
    finally:
        held.release()


def is_held(path: Path) -> bool:
    """Return whether any process or thread holds the lock on `path`."""
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINK)
    except FileNotFoundError:
        return False
    try:
        return is_locked(handle)
    finally:
        os.close(handle)


def lock(handle: int, wait: bool = False) -> bool:
    """Lock an open file exclusively; return whether that worked. Without `wait` it fails if another handle
    has the lock."""
    return _flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(handle: int) -> bool:
    """Return whether a handle other than this one has the lock on its file. During this test, which takes
    microseconds, a `lock` without `wait` by another process fails."""
    return not (_flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB) and _flock(handle, fcntl.LOCK_UN))


def _flock(handle: int, operation: int) -> bool:
    """Return whether it worked. Other errors, as of a network file system without locks, name the file."""
    try:
        fcntl.flock(handle, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.readlink(f"/proc/self/fd/{handle}")) from error
    return True
