"""A layer of faults under a process: counts what it writes, syncs, renames and removes below a folder, and
breaks one of these operations.

It sees what goes through Python, in any thread: `open` for writing, and os.fsync, rename, replace, unlink,
rmdir, mkdir, link. What compiled libraries write (Parquet, SQLite) it sees when that is synced or renamed.
"""

import builtins
import errno
import io
import os
import random
import shutil
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
        self._undo: list[tuple[str, int, Callable[[], None]]] = []
        self._early: list[str] = []
        self._kept = root.parent / f"{root.name}-kept"  # what a removal that is undone brings back

    def install(self) -> None:
        """Put this layer under the process, which is one of its own: nothing takes it away again."""
        self._real = {
            name: getattr(os, name)
            for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "link")
        }
        real_open: Any = io.open
        self._kept.mkdir(exist_ok=True)

        def opened(
            file: Any, mode: str = "r", buffering: int = -1, *args: Any, opener: Any = None, **kwargs: Any
        ) -> Any:
            if not isinstance(file, str | Path) or not self._below(file) or not set(mode) & set("wax+"):
                return real_open(file, mode, buffering, *args, opener=opener, **kwargs)
            self.hit("open", EMFILE=True)
            raw = _Raw(self, str(file), mode.replace("t", "").replace("b", ""), opener)
            self._unsynced.add(os.fstat(raw.fileno()).st_ino)
            if "b" in mode:
                return io.BufferedWriter(raw) if buffering else raw
            return io.TextIOWrapper(io.BufferedWriter(raw), *args, **kwargs)

        replaced: dict[str, Any] = {
            "fsync": self._fsync,
            "rename": self._rename,
            "replace": self._rename,
            "unlink": self._unlink,
            "remove": self._unlink,
            "rmdir": self._rmdir,
            "mkdir": self._mkdir,
            "link": self._link,
        }
        vars(os).update(replaced)
        vars(builtins)["open"] = vars(io)["open"] = opened

    def hit(self, what: str, torn: Callable[[], object] | None = None, EMFILE: bool = False) -> None:
        """Count an operation, and fail where it is the one."""
        with self._counting:  # other threads wait here while power fails
            self.count += 1
            if self.count != self.target:
                return
            if self.mode in ERRORS:
                if self.mode != "EMFILE" or EMFILE:  # only what opens a file needs a handle
                    raise OSError(ERRORS[self.mode], os.strerror(ERRORS[self.mode]))
                return
            if self.mode == "torn" and torn:
                torn()
            if self.mode in ("unsynced", "lost"):
                self._lose()
            os._exit(KILLED)

    def written(self, inode: int) -> None:
        self._unsynced.add(inode)

    def unsafe(self) -> list[str]:
        """Return what a power loss would have emptied or undone: names that files or folders got before their
        bytes were synced, and names in folders that are not synced yet."""
        late = [name for name, _, _ in self._undo if os.path.lexists(name)]
        return sorted({os.path.relpath(name, self.root) for name in [*self._early, *late]})

    def _is_unsynced(self, path: Path) -> bool:
        files = path.rglob("*") if path.is_dir() else [path]
        return any(file.is_file() and file.stat().st_ino in self._unsynced for file in files)

    def _lose(self) -> None:
        root = Path(self.root)
        self.root = "/no such folder/"  # what follows is no operation of the run
        for _, _, step in reversed(self._undo if self.mode == "lost" else []):
            with suppress(OSError):
                step()
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced:
                os.truncate(path, self._random.choice([0, path.stat().st_size // 2]))

    def _below(self, path: object, dir_fd: int | None = None) -> bool:
        return self._full(path, dir_fd).startswith(self.root)

    def _full(self, path: Any, dir_fd: int | None = None) -> str:
        base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
        return os.path.join(base, os.fspath(path))

    def _fsync(self, handle: int) -> None:
        name, stat = os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle)
        if (name + os.sep).startswith(self.root):
            self.hit(f"fsync {name}")
            self._unsynced.discard(stat.st_ino)
            self._undo = [name for name in self._undo if name[1] != stat.st_ino]
            time.sleep(self.slow_s)
        self._real["fsync"](handle)

    def _rename(self, source: object, target: object, **kwargs: object) -> None:
        if not self._below(target):
            return self._real["rename"](source, target, **kwargs)
        self.hit(f"rename {target}")
        source, target = self._full(source), self._full(target)
        if self._is_unsynced(Path(source)):
            self._early.append(target)
        before = self._keep(target) if os.path.isfile(target) else None
        self._real["rename"](source, target)

        def undo() -> None:
            self._real["rename"](target, source)
            if before:
                self._real["rename"](before, target)

        return self._undone_with(target, undo)

    def _unlink(self, path: object, *, dir_fd: int | None = None) -> None:
        full = self._full(path, dir_fd)
        if not full.startswith(self.root):
            return self._real["unlink"](path, dir_fd=dir_fd)
        self.hit(f"unlink {full}")
        before = self._keep(full) if os.path.isfile(full) else None
        self._real["unlink"](full)
        if before:
            self._undone_with(full, lambda: self._real["rename"](before, full))
        return None

    def _rmdir(self, path: object, *, dir_fd: int | None = None) -> None:
        full = self._full(path, dir_fd)
        if full.startswith(self.root):
            self.hit(f"rmdir {full}")
        self._real["rmdir"](full)
        if full.startswith(self.root):
            self._undone_with(full, lambda: self._real["mkdir"](full))

    def _mkdir(self, path: object, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        full = self._full(path, dir_fd)
        if full.startswith(self.root):
            self.hit(f"mkdir {full}")
        self._real["mkdir"](full, mode)
        if full.startswith(self.root):
            self._undone_with(full, lambda: shutil.rmtree(full, ignore_errors=True))

    def _link(self, source: object, target: object, **kwargs: object) -> None:
        full = self._full(target)
        if full.startswith(self.root):
            self.hit(f"link {full}")
        self._real["link"](source, target, **kwargs)
        if full.startswith(self.root):
            self._undone_with(full, lambda: self._real["unlink"](full))

    def _keep(self, path: str) -> str:
        kept = str(self._kept / f"{os.getpid()}-{self.count}")
        self._real["link"](path, kept)
        return kept

    def _undone_with(self, path: str, undo: Callable[[], None]) -> None:
        self._undo.append((path, os.stat(os.path.dirname(path)).st_ino, undo))


class _Raw(io.FileIO):
    def __init__(self, faults: Faults, path: str, mode: str, opener: Any) -> None:
        super().__init__(path, mode, opener=opener)
        self._faults = faults

    def write(self, data: Any) -> int:
        half = bytes(data)[: len(bytes(data)) // 2]
        self._faults.hit(f"write {self.name}", torn=lambda: super(_Raw, self).write(half))
        self._faults.written(os.fstat(self.fileno()).st_ino)
        return super().write(data)
