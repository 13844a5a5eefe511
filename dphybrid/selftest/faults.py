"""A layer of faults under a process: counts what it writes, syncs, renames and removes below a folder, and
breaks one of these operations.

It sees what goes through Python, in any thread: `open` for writing, fsync, and the changes of names that
Python audits. What compiled libraries write (Parquet, SQLite) it sees when that is synced or renamed.
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
"""kill: the process ends before the operation. torn: half of a write is done first. unsynced: as the power
fails, what was written to files and not fsynced is lost. lost: and so are names that were made, renamed or
removed in folders not fsynced since. The others: the operation fails once with that error."""


class Faults:
    """Counts operations below `root` and, at number `target` (from 1; 0: never), does what `mode` says. seed:
    which unsynced files go. slow_s: how much longer each fsync takes."""

    def __init__(
        self, root: Path, target: int = 0, mode: str = "kill", seed: int = 0, slow_s: float = 0.0
    ) -> None:
        self.root, self.target, self.mode, self.slow_s = str(root) + os.sep, target, mode, slow_s
        self.count = 0
        self._counting = threading.Lock()
        self._random = random.Random(seed)
        self._unsynced: set[int] = set()
        # name, the inode of its folder, which was not synced since, and what takes the name back
        self._undo: list[tuple[str, int, Callable[[], object]]] = []
        self._early: list[str] = []
        self._kept = root.parent / f"{root.name}-kept"  # what a removal that is undone brings back
        self._fsync = os.fsync
        self._open: Any = io.open

    def install(self) -> None:
        """Put this layer under the process, which is one of its own: nothing takes it away again."""
        self._kept.mkdir(exist_ok=True)
        # For good: a hook cannot be removed.
        sys.addaudithook(self._audited)  # comes before the operation, and may raise in its place
        # Python audits neither fsync nor writes.
        vars(os)["fsync"] = self._synced
        vars(builtins)["open"] = vars(io)["open"] = self._opened

    def hit(self, torn: Callable[[], object] | None = None, opens: bool = False) -> None:
        """Count an operation, and fail where it is the one."""
        with self._counting:  # other threads wait here while power fails
            self.count += 1
            if self.count != self.target:
                return
            if self.mode in ERRORS:
                if self.mode != "EMFILE" or opens:  # only what opens a file needs a handle
                    raise OSError(ERRORS[self.mode], os.strerror(ERRORS[self.mode]))
                return
            if self.mode == "torn" and torn:
                torn()
            if self.mode in ("unsynced", "lost"):
                self._lose()
            os._exit(KILLED)  # no `finally`, no buffer is flushed: as by kill -9

    def written(self, handle: int) -> None:
        """Note that a file has content that was not fsynced."""
        self._unsynced.add(os.fstat(handle).st_ino)

    def unsafe(self) -> list[str]:
        """Return what a power loss would have emptied or undone: names that files or folders got before their
        bytes were synced, and names in folders that are not synced yet."""
        late = [name for name, _, _ in self._undo if os.path.lexists(name)]
        return sorted({os.path.relpath(name, self.root) for name in [*self._early, *late]})

    def _lose(self) -> None:
        root = Path(self.root)
        self.root = "/no such folder/"  # what follows is no operation of the run
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
        """Hit what is about to change a name, and note how to take that back."""
        if event in ("os.rename", "os.link"):
            source, name = self._full(args[0], args[2]), self._full(args[1], args[3])
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            source = name = self._full(args[0], args[-1])
        else:
            return
        if not name.startswith(self.root):
            return
        self.hit()
        files = [Path(source), *Path(source).rglob("*")] if event == "os.rename" else []
        if any(file.is_file() and file.stat().st_ino in self._unsynced for file in files):
            self._early.append(name)
        if undo := self._undoing(event, source, name):
            self._undo.append((name, os.stat(os.path.dirname(name)).st_ino, undo))

    def _undoing(self, event: str, source: str, name: str) -> Callable[[], object] | None:
        """Return what takes a change back, None for one that is going to fail."""
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
