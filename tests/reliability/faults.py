"""A layer of faults under a process: counts the file operations below a folder (writes, fsyncs, renames,
removals), and breaks one of them.

It sees operations that go through Python, in any thread: `open` for writing, fsync, and the audited changes
of names. It does not see the writes of compiled libraries (Parquet, SQLite), but their files' renames, and
fsyncs through Python.
"""

import builtins
import errno
import io
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

KILLED = 137
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EROFS", "EIO", "EMFILE")}
MODES = ("kill", "torn", "unsynced", "lost", *ERRORS)
"""kill: the process ends before the operation. torn: it ends in the middle of a write. unsynced: power loss;
bytes written to files and not fsynced are lost. lost: the same, and names that were made, renamed or removed
in a folder are undone, unless the folder was fsynced since. The others: the operation fails once with that
error."""


class Faults:
    """Counts operations below `root` and breaks number `target` (from 1; 0: none) as `mode` says. seed:
    chooses how much of each unsynced file remains. slow_s: delay of each fsync."""

    def __init__(
        self, root: Path, target: int = 0, mode: str = "kill", seed: int = 0, slow_s: float = 0.0
    ) -> None:
        self.root, self.target, self.mode, self.slow_s = str(root) + os.sep, target, mode, slow_s
        self.count = 0
        self._counting = threading.Lock()
        self._random = random.Random(seed)
        self._unsynced: set[int] = set()
        # Changes of names that a power loss may undo: the name, the inode of its folder, and the function
        # that undoes the change.
        self._undo: list[tuple[str, int, Callable[[], object]]] = []
        self._early: list[str] = []
        # Holds links to removed and replaced files, so that undoing can bring them back.
        self._kept = root.parent / f"{root.name}-kept"
        self._fsync = os.fsync
        self._open: Any = io.open

    def install(self) -> None:
        """Put this layer under the process. It cannot be removed, so use a separate process."""
        self._kept.mkdir(exist_ok=True)
        # Python calls an audit hook before the operation; if the hook raises, the operation does not happen.
        # There is no way to remove a hook.
        sys.addaudithook(self._audited)
        # fsync and writes are not audited, so their functions are replaced.
        vars(os)["fsync"] = self._synced
        vars(builtins)["open"] = vars(io)["open"] = self._opened

    def hit(self, torn: Callable[[], object] | None = None, opens: bool = False) -> None:
        """Count an operation, and break it if its number is `target`. torn: does half of a write. opens: the
        operation opens a file."""
        # Held until the process has ended: no other thread may write while the power fails.
        with self._counting:
            self.count += 1
            if self.count != self.target:
                return
            if self.mode in ERRORS:
                if self.mode != "EMFILE" or opens:  # "too many open files": only opening can fail so
                    raise OSError(ERRORS[self.mode], os.strerror(ERRORS[self.mode]))
                return
            if self.mode == "torn" and torn:
                torn()
            if self.mode in ("unsynced", "lost"):
                self._lose()
            os._exit(KILLED)  # like kill -9: runs no `finally` and flushes no buffer

    def written(self, handle: int) -> None:
        """Note that a file has content that is not fsynced yet."""
        self._unsynced.add(os.fstat(handle).st_ino)

    def unsafe(self) -> list[str]:
        """Return the names that a power loss would have emptied or undone: those of files and folders renamed
        before their bytes were synced, and those in folders that are not synced yet."""
        late = [name for name, _, _ in self._undo if os.path.lexists(name)]
        return sorted({os.path.relpath(name, self.root) for name in [*self._early, *late]})

    def _lose(self) -> None:
        root = Path(self.root)
        self.root = "/no such folder/"  # the operations below are not the run's: do not count them
        for _, _, step in reversed(self._undo if self.mode == "lost" else []):
            with suppress(OSError):
                step()
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced:
                os.truncate(path, self._random.choice([0, path.stat().st_size // 2]))

    def _full(self, path: Any, dir_fd: int = -1) -> str:
        base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd >= 0 else os.getcwd()
        return os.path.join(base, os.fspath(path))

    def _opened(
        self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, opener: Any = None, **kwargs: Any
    ) -> Any:
        below = isinstance(file, str | Path) and self._full(file).startswith(self.root)
        if not below or not set(mode) & set("wax+"):
            return self._open(file, mode, buffering, *args, opener=opener, **kwargs)
        self.hit(opens=True)
        raw = _Raw(self, str(file), mode.replace("t", "").replace("b", ""), opener)
        if "b" in mode:
            return io.BufferedWriter(raw) if buffering else raw
        return io.TextIOWrapper(io.BufferedWriter(raw), *args, **kwargs)

    def _synced(self, handle: int) -> None:
        name, inode = os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle).st_ino
        if (name + os.sep).startswith(self.root):
            self.hit()
            self._unsynced.discard(inode)
            self._undo = [name for name in self._undo if name[1] != inode]
            time.sleep(self.slow_s)
        self._fsync(handle)

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        """Count a change of a name before it happens, and note how to undo it."""
        if event in ("os.rename", "os.link"):
            source, name = self._full(args[0], args[2]), self._full(args[1], args[3])
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            source = name = self._full(args[0], args[-1])
        else:
            return
        if not name.startswith(self.root):
            return
        self.hit()
        # A file renamed to its final name before an fsync can be empty under this name after a power loss.
        files = [Path(source), *Path(source).rglob("*")] if event == "os.rename" else []
        if any(file.is_file() and file.stat().st_ino in self._unsynced for file in files):
            self._early.append(name)
        if undo := self._undoing(event, source, name):
            self._undo.append((name, os.stat(os.path.dirname(name)).st_ino, undo))

    def _undoing(self, event: str, source: str, name: str) -> Callable[[], object] | None:
        """Return the function that undoes a change of a name; None if the change is going to fail."""
        if event in ("os.mkdir", "os.link") and os.path.lexists(name):
            return None
        if event == "os.mkdir":
            return lambda: shutil.rmtree(name, ignore_errors=True)
        if event == "os.link":
            return lambda: os.unlink(name)
        if event == "os.rmdir":
            return lambda: os.mkdir(name)
        before = None
        if os.path.isfile(name):
            before = str(self._kept / f"{os.getpid()}-{self.count}")
            os.link(name, before)
        if event == "os.remove":
            return (lambda: os.rename(before, name)) if before else None

        def undo() -> None:
            os.rename(name, source)
            if before:
                os.rename(before, name)

        return undo if os.path.lexists(source) else None


class _Raw(io.FileIO):
    def __init__(self, faults: Faults, path: str, mode: str, opener: Any) -> None:
        super().__init__(path, mode, opener=opener)
        self._faults = faults
        faults.written(self.fileno())

    def write(self, data: Any) -> int:
        half = bytes(data)[: len(bytes(data)) // 2]
        self._faults.hit(torn=lambda: super(_Raw, self).write(half))
        self._faults.written(self.fileno())
        return super().write(data)
