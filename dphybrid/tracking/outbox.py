"""A run's outbox: one SQLite file, `RUN.db`, that holds records for MLflow until they have arrived.

The training appends records and never waits for a server. A record survives the end of the process; one
written with `sync`, and all before it, also survive a power loss. Only the process that holds `RUN.lock`
sends: the training itself, from a thread, or `dphybrid sync`. A file that SQLite finds damaged is renamed to
`RUN.damaged-N.db`, and a new one is made. A new one is also made when another process renamed or removed the
file.
"""

import csv
import errno
import io
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dphybrid.tracking.base import Record
from dphybrid.util import files
from dphybrid.util.errors import counted
from dphybrid.util.locks import FileLock

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: every step writes a record
# _PRIVATE: mode of the files, as they hold the server's address, which may contain a password.
# _WAIT_S: how long SQLite waits for another process's transaction.
_PRIVATE, _WAIT_S, _VERSION = 0o600, 30.0, 2
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_NO_JSON = "damaged: no JSON"
"""The reason noted on a record whose own text is damaged; it is never sent."""
_SCHEMA = """
BEGIN;
PRAGMA user_version = {version};
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE records (n INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER, op TEXT, body TEXT, content BLOB,
                      refused TEXT);
CREATE TABLE details (time_ms INTEGER, step INTEGER, name TEXT, value REAL);
CREATE TABLE steps (name TEXT PRIMARY KEY, step INTEGER) WITHOUT ROWID;
INSERT INTO sqlite_sequence VALUES ('records', {first});
COMMIT;
"""
_ADD = "INSERT INTO facts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value"
_ADD_STEP = "INSERT INTO steps VALUES (?, ?) ON CONFLICT DO UPDATE SET step = max(step, excluded.step)"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Losses:
    """The part of a run's record that never reaches the server.

    refused: records that the server refused; unread: records that were damaged; unkept: lines of metrics that
    could not be written; removed: how often the file was removed; damaged: files that were set aside.
    """

    refused: int = 0
    unread: int = 0
    unkept: int = 0
    removed: int = 0
    damaged: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return self != Losses()

    def text(self) -> str:
        """Return the losses in words, or ""."""
        counts = {
            "refused by the server": self.refused,
            "damaged on the disk": self.unread,
            "not written down (disk full?)": self.unkept,
        }
        parts = [f"{counted(n, 'record')} {what}" for what, n in counts.items() if n]
        if self.removed:
            parts.append("the outbox was removed during the run, and records that it held are missing")
        parts += [f"{path} was damaged, and its records are missing" for path in self.damaged]
        return "; ".join(parts)


class Outbox:
    """The records of run `run_id`, in `folder`. Only one process appends; it may do so from any thread."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.run_id = run_id
        self.path = folder / f"{run_id}.db"
        self._database: sqlite3.Connection | None = None
        # Reentrant: `_transact` holds it when it calls `_close`, which takes it again.
        self._lock = threading.RLock()
        # Metric -> the last step that earlier attempts of this run recorded.
        self._earlier: dict[str, int] | None = None
        # Losses that no transaction has written down yet.
        self._uncommitted: Counter[str] = Counter()
        self._file = (0, 0)
        self._num_damaged = 0  # damaged files that existed when `_file` was opened
        self._sending: FileLock | None = None

    def set_destination(self, **values: str) -> None:
        """Save where the records go: tracking_uri, experiment_id."""
        rows = list(values.items())
        self._transact(
            lambda it: it.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows), sync=True
        )

    def destination(self) -> dict[str, str]:
        """Return the values that `set_destination` saved."""
        return self._transact(lambda it: dict(it.execute("SELECT name, value FROM facts")))

    def append(self, record: Record, *, content: bytes | None = None, sync: bool = False) -> int:
        """Add a record with the current time and, for a file, its content; return the record's number.
        Raises OSError."""
        return self._transact(lambda it: _insert(it, record, content), sync=sync)

    def append_metrics(
        self, metrics: Mapping[str, float], step: int, details: Collection[str] = (), anew: bool = False
    ) -> None:
        """Add metrics at a step, except those that an earlier attempt of this run recorded at that step or a
        later one.

        details: names of metrics that go into the table of details instead of being sent as metrics. anew:
        add the metrics that an earlier attempt recorded, too.
        """
        with self._lock:
            # Read once, before this attempt writes its first steps, which must not count as earlier ones.
            if self._earlier is None:
                self._earlier = self._transact(lambda it: dict(it.execute("SELECT * FROM steps")))
        earlier = {} if anew else self._earlier
        kept = {name: value for name, value in metrics.items() if name not in earlier or step > earlier[name]}
        now = int(time.time() * 1000)
        fine = [(now, step, name, kept.pop(name)) for name in details if name in kept]
        steps = [(name, step) for name in (*kept, *(row[2] for row in fine))]

        def write(database: sqlite3.Connection) -> None:
            if kept:
                _insert(database, {"op": "metrics", "step": step, "values": kept})
            database.executemany("INSERT INTO details VALUES (?, ?, ?, ?)", fine)
            database.executemany(_ADD_STEP, steps)

        if steps:
            self._transact(write)

    def count_unkept(self) -> None:
        """Count a line of metrics that could not be written; the next transaction saves the count."""
        with self._lock:
            self._uncommitted["unkept"] += 1

    def sync(self) -> None:
        """Make all records so far survive a power loss."""
        # Any changed value would do: SQLite syncs no transaction that changes nothing.
        self.set_destination(synced=str(time.time_ns()))

    def pending(self, limit: int) -> list[Record]:
        """Return up to `limit` records that have not arrived, oldest first."""
        query = "SELECT n, time_ms, op, body, content FROM records WHERE refused IS NULL ORDER BY n LIMIT ?"

        def read(database: sqlite3.Connection) -> list[Record]:
            found = list[Record]()
            # Again if all `limit` records were damaged: an empty list would mean that nothing is pending.
            while not found and (rows := database.execute(query, (limit,)).fetchall()):
                for n, time_ms, op, body, content in rows:
                    try:
                        found.append({"n": n, "t": time_ms, "op": op, **json.loads(body), "content": content})
                    except (ValueError, TypeError):  # SQLite does not notice damage within a value
                        database.execute("UPDATE records SET refused = ? WHERE n = ?", (_NO_JSON, n))
            return found

        return self._transact(read)

    def counts(self) -> tuple[int, int]:
        """Return how many records wait and how many were refused; a file that cannot be read counts as one
        waiting record. Changes nothing, as another process may be using the file."""
        query = "SELECT count(*) - count(refused), count(refused) FROM records"
        try:
            with closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as database:
                ((wait, refused),) = database.execute(query)
                return wait, refused
        except sqlite3.Error:
            return 1, 0

    def remove(self, records: Sequence[Record]) -> None:
        """Remove records that have arrived."""
        numbers = [(record["n"],) for record in records]
        query = "DELETE FROM records WHERE n = ? AND refused IS NULL"
        self._transact(lambda it: it.executemany(query, numbers))

    def refuse(self, record: Record, reason: str) -> None:
        """Mark a record as refused by the server: it stays in the file, but `pending` skips it."""
        query, values = "UPDATE records SET refused = ? WHERE n = ?", (reason[:500], record["n"])
        self._transact(lambda it: it.execute(query, values), sync=True)

    def offer_again(self, kinds: Sequence[str]) -> None:
        """Make refused records of these kinds pending again."""
        places = ", ".join("?" * len(kinds))
        query = f"UPDATE records SET refused = NULL WHERE refused IS NOT NULL AND op IN ({places})"  # noqa: S608 - question marks alone
        if self._transact(lambda it: it.execute(query, kinds).rowcount):
            # Clears the note on the run's page; `Sender.deliver` adds a new one if records are refused again.
            self.append({"op": "losses", "text": ""}, sync=True)

    def pack_details(self) -> None:
        """Turn the metrics that are kept as details into one record, a CSV file. Each attempt of a run has
        its own folder, named by its first step."""

        def pack(database: sqlite3.Connection) -> None:
            # Not from system metrics: their steps are seconds.
            first = "SELECT min(step) FROM details WHERE step > 0 AND name NOT LIKE 'system/%'"
            every = "SELECT time_ms, step, name, coalesce(value, 'nan') FROM details ORDER BY rowid"
            ((step,),), rows = database.execute(first), database.execute(every).fetchall()
            if not rows:
                return
            stream = io.StringIO("time_ms,step,metric,value\n")
            stream.seek(0, io.SEEK_END)
            csv.writer(stream, lineterminator="\n").writerows(rows)
            folder = f"details/from-step-{step or 0:06d}"
            record = {"op": "file", "name": "metrics.csv", "folder": folder}
            _insert(database, record, stream.getvalue().encode())
            database.execute("DELETE FROM details")

        self._transact(pack)

    def losses(self) -> Losses:
        """Return all losses of the run so far."""

        def count(database: sqlite3.Connection) -> tuple[int, int, int, int]:
            query = "SELECT count(refused), count(CASE WHEN refused = ? THEN 1 END) FROM records"
            ((refused, unread),) = database.execute(query, (_NO_JSON,))
            facts = dict(database.execute("SELECT name, value FROM facts"))
            return refused - unread, unread, facts.get("unkept", 0), facts.get("removed", 0)

        return Losses(*self._transact(count), tuple(self._damaged()))

    def hold(self) -> bool:
        """Take the right to send; return whether this process has it now. The kernel releases it when the
        process ends."""
        if self._sending is None:
            files.make_folder(self.path.parent, 0o700)
            lock = FileLock(self.path.with_suffix(".lock"), mode=_PRIVATE)
            if not lock.acquire():
                return False
            self._sending = lock
        return True

    def release(self) -> None:
        """Close the file and give up the right to send."""
        self._close()
        if self._sending is not None:
            self._sending.release()
            self._sending = None

    def _transact(self, work: Callable[[sqlite3.Connection], _T], *, sync: bool = False) -> _T:
        """Do `work` in one transaction and return its result. If the file is damaged or no longer has its
        name, do it again in a new file.

        sync: this transaction, and all before it, must survive a power loss. Raises OSError.
        """
        with self._lock:
            try:
                try:
                    return self._transact_once(work, sync)
                except UnicodeEncodeError:  # a ValueError of `work`: SQLite takes no lone surrogates
                    raise
                # ValueError: the open file is no longer the one at `self.path`
                except (sqlite3.Error, ValueError) as error:
                    if self._is_gone():
                        # Not if another process set it aside: `losses` counts that file by its name.
                        self._uncommitted["removed"] += len(self._damaged()) == self._num_damaged
                        self._close()
                    elif isinstance(error, sqlite3.Error) and _code(error) not in _DAMAGED:
                        raise
                    else:
                        self._set_aside()
                    # First in the new file, so that the run's page shows the loss even if this process dies.
                    removed = self._uncommitted["removed"]
                    lost = Losses(removed=removed, damaged=tuple(self._damaged())).text()
                    self._transact_once(lambda it: _insert(it, {"op": "losses", "text": lost}), True)
                    return self._transact_once(work, sync)
            except sqlite3.Error as error:
                reason = errno.ENOSPC if _code(error) == sqlite3.SQLITE_FULL else errno.EIO
                raise OSError(reason, f"{os.strerror(reason)} ({error})", str(self.path)) from error

    def _transact_once(self, work: Callable[[sqlite3.Connection], _T], sync: bool) -> _T:
        if self._database is None:
            self._database = self._opened()
        # With a write-ahead log, NORMAL survives the end of the process. FULL also survives a power loss, but
        # waits for the disk, which takes too long for each step.
        self._database.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        # IMMEDIATE takes the write lock at the start. A lock that is asked for in mid transaction may be
        # refused without waiting.
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:  # commits, or rolls back
            if self._uncommitted:
                self._database.executemany(_ADD, self._uncommitted.items())
            result = work(self._database)
        # Checked after the commit: SQLite keeps writing to a renamed or removed file, which nobody reads.
        if self._is_gone():
            raise ValueError(f"{self.path}: is another file now")
        self._uncommitted.clear()
        return result

    def _is_gone(self) -> bool:
        """Return whether the open file was renamed or removed."""
        return self._database is not None and self._file != _identity(self.path)

    def _opened(self) -> sqlite3.Connection:
        files.make_folder(self.path.parent, 0o700)
        # SQLite would make a file that everybody can read. O_EXCL, so that an existing file is not opened:
        # closing any handle of it would release the POSIX locks that this process holds on it.
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE))
        # Before connecting: if another file takes the name in between, `_is_gone` notices the difference.
        self._file, self._num_damaged = _identity(self.path), len(self._damaged())
        # isolation_level: `_transact_once` starts transactions, not Python's module. Any thread may call;
        # `_lock` lets one through at a time.
        database = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        # Text of a damaged file may not be UTF-8; that must not raise here.
        database.text_factory = lambda content: content.decode(errors="replace")
        try:
            ((answer,), *_), ((version,),) = (
                database.execute(f"PRAGMA {question}") for question in ("quick_check(1)", "user_version")
            )
            if answer != "ok" or version not in (0, _VERSION):
                error = sqlite3.DatabaseError(f"version {version}, {answer}")
                error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise error
            database.execute("PRAGMA journal_mode = WAL")
            if version == 0:
                # A new file's record numbers start above those of a file that was set aside: the sender may
                # still hold records of that file, and would otherwise remove new ones by the same numbers.
                database.executescript(_SCHEMA.format(version=_VERSION, first=time.time_ns()))
        except BaseException:
            database.close()
            raise
        return database

    def _close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _set_aside(self) -> None:
        """Rename the damaged file and its write-ahead log."""
        self._close()
        aside = self.path.with_suffix(f".damaged-{len(self._damaged()) + 1}.db")
        # The database last: a crash in between must not set it aside without its log, as if it were whole.
        for suffix in ("-shm", "-wal", ""):
            with suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        files.sync(self.path.parent)

    def _damaged(self) -> list[Path]:
        """Return the damaged files that were set aside."""
        found = self.path.parent.glob(f"{self.path.stem}.damaged-*.db*")
        return sorted({path.with_suffix(".db") for path in found})


def outboxes(folder: Path) -> list[Outbox]:
    """Return the outboxes in a folder, oldest first."""
    paths = [path for path in folder.glob("*.db") if ".damaged-" not in path.name]
    return [Outbox(folder, path.stem) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]


def waiting(folder: Path) -> int:
    """Return the number of runs in a folder whose records wait and are sent by no process."""
    count = 0
    for outbox in outboxes(folder):
        with suppress(OSError):
            if outbox.counts()[0] and outbox.hold():
                outbox.release()
                count += 1
    return count


def _insert(database: sqlite3.Connection, record: Record, content: bytes | None = None) -> int:
    body = _ENCODER.encode({name: value for name, value in record.items() if name != "op"})
    row = (int(time.time() * 1000), record["op"], body, content)
    query = "INSERT INTO records (time_ms, op, body, content) VALUES (?, ?, ?, ?)"
    return database.execute(query, row).lastrowid or 0


def _identity(path: Path) -> tuple[int, int]:
    """Return the device and inode of a file, which differ from those of a later file of this name; zeros if
    it does not exist."""
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return 0, 0


def _code(error: sqlite3.Error) -> int:
    """Return the SQLite code of an error; 0 for errors that Python's module raises itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
