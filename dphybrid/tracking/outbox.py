"""A run's outbox: one SQLite file, `RUN.db`, holds what MLflow should get until it has arrived.

The training appends records and never waits for a server. A record outlives the process, one with `sync` (and
all before it) also a loss of power. Whoever holds `RUN.lock` sends: the training's own thread, or `dphybrid
sync`. A file that SQLite finds damaged is renamed to `RUN.damaged-N.db`, and a new one takes its place, also
where another process did that, or removed the file.
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

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: a record is written at each step
# _WAIT_S: how long SQLite waits for another process's transaction.
_PRIVATE, _WAIT_S, _VERSION = 0o600, 30.0, 2
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_NO_JSON = "damaged: no JSON"
"""Why a record is not offered whose own text is damaged."""
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
    """What of a run's record does not reach the server.

    refused: records that the server did not take; unread: records that were damaged; unkept: lines of metrics
    that could not be written; removed: times that the file was gone; damaged: files set aside.
    """

    refused: int = 0
    unread: int = 0
    unkept: int = 0
    removed: int = 0
    damaged: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return self != Losses()

    def text(self) -> str:
        """Return it for people, or nothing."""
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
    """The records of one run, `run_id`, in `folder`. One process appends, from any of its threads."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.run_id = run_id
        self.path = folder / f"{run_id}.db"
        self._database: sqlite3.Connection | None = None
        # Reentrant: `_do` closes the file, too, while it holds it.
        self._lock = threading.RLock()
        self._earlier: dict[str, int] | None = None
        self._noted: Counter[str] = Counter()
        self._file = (0, 0)
        self._asides = 0
        self._sending: FileLock | None = None

    def set_destination(self, **values: str) -> None:
        """Keep where the records go: tracking_uri, experiment_id."""
        rows = list(values.items())
        self._do(lambda it: it.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows), sync=True)

    def destination(self) -> dict[str, str]:
        """Return what `set_destination` kept, or nothing."""
        return self._do(lambda it: dict(it.execute("SELECT name, value FROM facts")))

    def append(self, record: Record, *, content: bytes | None = None, sync: bool = False) -> int:
        """Add a record, the content of its file, and the time; return its number. Raises OSError."""
        return self._do(lambda it: _insert(it, record, content), sync=sync)

    def append_metrics(
        self, metrics: Mapping[str, float], step: int, details: Collection[str] = (), anew: bool = False
    ) -> None:
        """Add metrics at a step, without those that an earlier attempt of this run recorded at that step or a
        later one.

        details: names of those that are kept for the table of details instead of being sent as metrics. anew:
        add those of an earlier attempt, too.
        """
        with self._lock:
            # Once, before this attempt's first line: its own steps must not count as an earlier one's.
            if self._earlier is None:
                self._earlier = self._do(lambda it: dict(it.execute("SELECT * FROM steps")))
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
            self._do(write)

    def count_unkept(self) -> None:
        """Note that a line of metrics could not be written; the next transaction keeps the count."""
        with self._lock:
            self._noted["unkept"] += 1

    def sync(self) -> None:
        """Have all records so far outlive a loss of power."""
        # A transaction that changes nothing is not synced.
        self.set_destination(synced=str(time.time_ns()))

    def pending(self, limit: int) -> list[Record]:
        """Return up to `limit` records that have not arrived, oldest first."""
        query = "SELECT n, time_ms, op, body, content FROM records WHERE refused IS NULL ORDER BY n LIMIT ?"

        def read(database: sqlite3.Connection) -> list[Record]:
            found = list[Record]()
            while not found and (rows := database.execute(query, (limit,)).fetchall()):
                for n, time_ms, op, body, content in rows:
                    try:
                        found.append({"n": n, "t": time_ms, "op": op, **json.loads(body), "content": content})
                    except (ValueError, TypeError):  # SQLite notices no damage within a value
                        database.execute("UPDATE records SET refused = ? WHERE n = ?", (_NO_JSON, n))
            return found

        return self._do(read)

    def counts(self) -> tuple[int, int]:
        """Return how many records wait and how many were refused; a file that cannot be read waits. Changes
        nothing: another process may be using the file."""
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
        self._do(lambda it: it.executemany(query, numbers))

    def refuse(self, record: Record, reason: str) -> None:
        """Keep a record that the server does not take, out of the others' way."""
        query, values = "UPDATE records SET refused = ? WHERE n = ?", (reason[:500], record["n"])
        self._do(lambda it: it.execute(query, values), sync=True)

    def offer_again(self, kinds: Sequence[str]) -> None:
        """Have refused records of these kinds sent again."""
        places = ", ".join("?" * len(kinds))
        query = f"UPDATE records SET refused = NULL WHERE refused IS NOT NULL AND op IN ({places})"  # noqa: S608 - question marks alone
        if self._do(lambda it: it.execute(query, kinds).rowcount):
            self.append({"op": "losses", "text": ""}, sync=True)  # told anew where one is refused again

    def pack_details(self) -> None:
        """Turn the metrics that were kept as details into a record of a CSV file. Each attempt of a run has a
        folder of its own, from its first step on."""

        def pack(database: sqlite3.Connection) -> None:
            # The steps of system metrics are seconds.
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

        self._do(pack)

    def losses(self) -> Losses:
        """Return all that the run has lost so far."""

        def count(database: sqlite3.Connection) -> tuple[int, int, int, int]:
            query = "SELECT count(refused), count(CASE WHEN refused = ? THEN 1 END) FROM records"
            ((refused, unread),) = database.execute(query, (_NO_JSON,))
            facts = dict(database.execute("SELECT name, value FROM facts"))
            return refused - unread, unread, facts.get("unkept", 0), facts.get("removed", 0)

        return Losses(*self._do(count), tuple(self._damaged()))

    def hold(self) -> bool:
        """Become the one that sends, unless somebody is. The kernel ends this with the process."""
        if self._sending is None:
            files.make_folder(self.path.parent, 0o700)
            lock = FileLock(self.path.with_suffix(".lock"), mode=_PRIVATE)
            if not lock.acquire():
                return False
            self._sending = lock
        return True

    def release(self) -> None:
        """Close the file and let somebody else send."""
        self._close()
        if self._sending is not None:
            self._sending.release()
            self._sending = None

    def _do(self, work: Callable[[sqlite3.Connection], _T], *, sync: bool = False) -> _T:
        """Return what `work` does in one transaction; again, in a new file, when this one is damaged or gone.

        sync: this and all transactions before outlive a loss of power. Raises OSError.
        """
        with self._lock:
            try:
                try:
                    return self._try(work, sync)
                except (sqlite3.Error, ValueError) as error:  # a ValueError: another file has its name
                    if self._is_gone():
                        # A file that another process set aside is counted by its name.
                        self._noted["removed"] += len(self._damaged()) == self._asides
                        self._close()
                    elif isinstance(error, sqlite3.Error) and _code(error) not in _DAMAGED:
                        raise
                    else:
                        self._set_aside()
                    lost = Losses(removed=self._noted["removed"], damaged=tuple(self._damaged())).text()
                    self._try(lambda it: _insert(it, {"op": "losses", "text": lost}), True)
                    return self._try(work, sync)
            except sqlite3.Error as error:
                reason = errno.ENOSPC if _code(error) == sqlite3.SQLITE_FULL else errno.EIO
                raise OSError(reason, f"{os.strerror(reason)} ({error})", str(self.path)) from error

    def _try(self, work: Callable[[sqlite3.Connection], _T], sync: bool) -> _T:
        if self._database is None:
            self._database = self._opened()
        # With a write-ahead log, NORMAL outlives the process. FULL waits for the disk: too long for a step.
        self._database.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        # IMMEDIATE takes the lock for writing at once: a later one might not get it in mid transaction.
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:  # commits, or rolls back
            if self._noted:
                self._database.executemany(_ADD, self._noted.items())
            result = work(self._database)
        # After the commit: SQLite goes on writing to a file that has lost its name, where nobody reads.
        if self._is_gone():
            raise ValueError(f"{self.path}: is another file now")
        self._noted.clear()
        return result

    def _is_gone(self) -> bool:
        """Tell whether the open file has lost its name."""
        return self._database is not None and self._file != _identity(self.path)

    def _opened(self) -> sqlite3.Connection:
        files.make_folder(self.path.parent, 0o700)
        # SQLite itself would let everybody read a new file. One that is there is not opened: closing it would
        # release the locks that this process has on it.
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE))
        # Before it is opened: one that takes its place in between counts as gone, and is opened again.
        self._file, self._asides = _identity(self.path), len(self._damaged())
        # Transactions begin in `_try`, not where Python's module would; threads take turns by `_lock`.
        database = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        database.text_factory = lambda content: content.decode(errors="replace")  # of a damaged file
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
                # Numbers of a later file are higher than those of one that was set aside, of which some may
                # be on their way.
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
        """Rename the damaged file and its log."""
        self._close()
        aside = self.path.with_suffix(f".damaged-{len(self._damaged()) + 1}.db")
        for suffix in ("-shm", "-wal", ""):  # the file last: without its log it would look whole
            with suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        files.sync(self.path.parent)

    def _damaged(self) -> list[Path]:
        """Return the damaged files that were set aside."""
        found = self.path.parent.glob(f"{self.path.stem}.damaged-*.db*")
        return sorted({path.with_suffix(".db") for path in found})


def outboxes(folder: Path) -> list[Outbox]:
    """Return the outboxes of a folder, oldest first."""
    paths = [path for path in folder.glob("*.db") if ".damaged-" not in path.name]
    return [Outbox(folder, path.stem) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]


def waiting(folder: Path) -> int:
    """Return how many runs of a folder hold records that nobody is sending."""
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
    """Return what tells a file from another one of its name; zeros of none."""
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return 0, 0


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's code of an error; those of Python's module itself have none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
