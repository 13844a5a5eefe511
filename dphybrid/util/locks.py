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


def take(path: Path, wait: bool = False) -> int | None:
    """Lock a file, which is made if it is missing; return its handle, which holds the lock until it is
    closed. None if another process or thread holds it; with `wait`, wait for that. Never follows a symbolic
    link."""
    while True:
        handle, taken = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666), False
        try:
            if not lock(handle, wait):
                return None
            if taken := _stands_at(path, handle):
                return handle
        finally:
            if not taken:
                os.close(handle)


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
    handle = take(path, wait=True)
    assert handle is not None
    try:
        yield
    finally:
        # While the lock is still held: afterwards the file may already be another process's lock.
        path.unlink(missing_ok=True)
        os.close(handle)


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
