"""The SQLite file of an outbox: numbered records and a few facts, each with a checksum.

SQLite notices a damaged page, but no flipped bit in a value and no missing row: the checksums and numbers do.
A damaged file is renamed to `NAME.damaged-N.db`, and a new one takes over what is readable. A write-ahead log
that was cut off between two commits looks whole; what it held came after the newest checkpoint.
"""

import errno
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from dphybrid.util import files
from dphybrid.util.locks import NO_LINK

Row = tuple[int, int, str, str, str | None, bytes | None]
"""Number, milliseconds, kind, JSON, why it is kept although nobody sends it, content of a file."""

LOST = "lost"
"""Kind of the records that stand for missing ones."""

PRIVATE = 0o600
_VERSION, _PAGE_BYTES, _WAIT_S = 1, 4096, 30.0
_SCHEMA = f"""
PRAGMA page_size = {_PAGE_BYTES}; PRAGMA journal_mode = MEMORY; PRAGMA user_version = {_VERSION};
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT, crc INTEGER) WITHOUT ROWID;
CREATE TABLE records (n INTEGER PRIMARY KEY, time_ms INTEGER, op TEXT, body TEXT, kept TEXT, crc INTEGER,
                      content BLOB);
"""
_ERRORS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_BUSY: errno.EAGAIN,
}
UNREADABLE = (sqlite3.Error, UnicodeError)
"""What reading a damaged file raises; SQLite quotes from the file in its messages, which may be no text."""
_T = TypeVar("_T")


class _Damaged(sqlite3.DatabaseError):
    """The file does not hold what was written."""


class OutboxFile:
    """The file at `path`, for all threads of a process; other processes may have it open, too.

    new: nothing was written yet, so that a missing file is not a loss.
    """

    def __init__(self, path: Path, new: bool) -> None:
        self.path, self._new = path, new
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._inode, self._synced = 0, True

    def do(self, work: Callable[[sqlite3.Connection], _T], *, sync: bool = False) -> _T:
        """Return what `work` does in one transaction; again, in a new file, when this one is damaged.

        sync: this and all transactions before outlive a loss of power. Raises OSError.
        """
        with self._lock:
            try:
                try:
                    return self._try(work, sync)
                except UNREADABLE as error:
                    if not isinstance(error, _Damaged | UnicodeError) and _code(error) in (None, *_ERRORS):
                        raise
                    self._renew()
                    return self._try(work, sync)
            except UNREADABLE as error:
                reason = _ERRORS.get(_code(error) or 0, errno.EIO)
                raise OSError(reason, f"{os.strerror(reason)} ({error})", str(self.path)) from error

    def _try(self, work: Callable[[sqlite3.Connection], _T], sync: bool) -> _T:
        database = self._opened()
        if sync != self._synced:  # a statement fewer for most transactions
            database.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            self._synced = sync
        with _transaction(database):
            return work(database)

    def shrink(self) -> None:
        """Give the disk the room of removed records back, if it takes the copy that this needs."""
        with self._lock, suppress(sqlite3.Error, OSError):
            self._opened().execute("VACUUM")

    def close(self) -> None:
        """Close the file, which is one file then; the next transaction opens it."""
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def set_aside(self) -> list[Path]:
        """Return the damaged files that were set aside."""
        found = self.path.parent.glob(f"{self.path.stem}.damaged-*.db*")
        return sorted({path.with_suffix(".db") for path in found})

    def _opened(self) -> sqlite3.Connection:
        if self._database is not None:
            if self._inode == _inode(self.path):
                return self._database
            self.close()  # another process has found the file damaged and set it aside
        if not self.path.exists():
            self._rename()  # the log of a file that was removed belongs to no other
            self._create([] if self._new else [(1, 0, LOST, "{}", "missing", None)], {"newest": "1"})
        self._new = False
        self._inode, self._database = _inode(self.path), connect(self.path)
        self._synced = True  # as SQLite begins
        self._check(self._database)
        return self._database

    def _check(self, database: sqlite3.Connection) -> None:
        ((version,),) = database.execute("PRAGMA user_version")
        frames = _frames(self.path)  # what a process that was killed had committed
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA journal_size_limit = 0")  # so that nothing outdated stays in the log
        ((busy, found, _),) = database.execute("PRAGMA wal_checkpoint(PASSIVE)")
        (answer,), *_ = database.execute("PRAGMA quick_check(1)")
        if version != _VERSION or (not busy and found < frames) or answer != "ok":
            raise _Damaged(f"version {version}, {found} of {frames} pages in the log, {answer}")
        newest, sent = number(database, "newest"), number(database, "sent")
        ((there,),) = database.execute("SELECT count(*) FROM records WHERE n > ?", (sent,))
        if there != newest - sent:
            raise _Damaged(f"{there} records of {newest - sent}")

    def _create(self, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
        folder = self.path.parent
        files.make_folder(folder, 0o700)
        files.clear_leftovers(folder, self.path.name)
        partial = files.temporary(self.path)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINK, PRIVATE))
        try:
            with closing(connect(partial)) as database:
                database.executescript(_SCHEMA)
                with _transaction(database):
                    for row in rows:
                        write_row(database, row)
                    set_facts(database, facts if rows else {})
            files.sync(partial)
            os.replace(partial, self.path)
            files.sync(folder)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _renew(self) -> None:
        """Set the damaged file aside, and put what can be read of it into a new one. Records that stand for
        the missing ones keep the numbers as they were: somebody may be sending some."""
        self.close()
        rows, facts = _readable(self._rename())
        newest = max([int(facts.get("newest", 1)), int(facts.get("sent", 0)), *rows])
        sent = int(facts.get("sent", min(rows, default=1) - 1))
        for missing in set(range(sent + 1, newest + 1)).difference(rows):
            rows[missing] = (missing, 0, LOST, "{}", "damaged", None)
        facts |= {"newest": str(newest), "sent": str(sent)}
        self._create([rows[n] for n in sorted(rows)] or [(newest, 0, LOST, "{}", "damaged", None)], facts)

    def _rename(self) -> Path:
        """Set the file and its log aside and return its name then. Whoever has them open goes on in these."""
        there, place = self.set_aside(), 1
        while (aside := self.path.with_suffix(f".damaged-{place}.db")) in there:
            place += 1
        Path(f"{self.path}-shm").unlink(missing_ok=True)
        for suffix in ("-wal", ""):  # the file last: without its log it would look whole
            with suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
                files.sync(self.path.parent)
        return aside


def connect(path: Path) -> sqlite3.Connection:
    """Open a file for any thread; statements are transactions of their own."""
    database = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
    database.text_factory = lambda content: content.decode(
        errors="replace"
    )  # the checksum finds what differs
    return database


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def fact(database: sqlite3.Connection, name: str) -> str | None:
    """Return a fact, or None. Raises `_Damaged`."""
    for value, crc in database.execute("SELECT value, crc FROM facts WHERE name = ?", (name,)):
        if crc != _sum(name, value):
            raise _Damaged(f"fact {name}")
        return str(value)
    return None


def number(database: sqlite3.Connection, name: str) -> int:
    """Return a fact that counts, 0 where there is none. Raises `_Damaged`."""
    return int(fact(database, name) or 0)


def set_facts(database: sqlite3.Connection, facts: Mapping[str, object]) -> None:
    rows = [(name, str(value), _sum(name, str(value))) for name, value in facts.items()]
    database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", rows)


def rows_where(database: sqlite3.Connection, condition: str, *values: object) -> Iterator[Row]:
    """Yield the records that an SQL condition names. Raises `_Damaged` for one that is not as it was
    written."""
    for *row, crc, content in database.execute(f"SELECT * FROM records WHERE {condition}", values):  # noqa: S608 - written in this package
        if crc != _sum(*row, content):
            raise _Damaged(f"record {row[0]}")
        yield (*row, content)


def write_row(database: sqlite3.Connection, row: Row) -> None:
    """Add a record, or replace the one of its number."""
    database.execute(
        "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", (*row[:5], _sum(*row), row[5])
    )


def _readable(path: Path) -> tuple[dict[int, Row], dict[str, str]]:
    """Return the records by number and the facts of a damaged file that are as they were written: up to the
    damage, and, from the other end, behind it."""
    rows: dict[int, Row] = {}
    facts: dict[str, str] = {}
    with suppress(*UNREADABLE), closing(connect(path)) as database:
        database.execute("PRAGMA writable_schema = ON")  # opens a file that is too short, too
        for order in ("ASC", "DESC"):
            with suppress(*UNREADABLE):
                for *row, crc, content in database.execute(f"SELECT * FROM records ORDER BY n {order}"):  # noqa: S608 - ASC or DESC
                    if crc == _sum(*row, content):
                        rows[row[0]] = (*row, content)
            with suppress(*UNREADABLE):
                for name, value, crc in database.execute(f"SELECT * FROM facts ORDER BY name {order}"):  # noqa: S608 - ASC or DESC
                    if crc == _sum(name, value):
                        facts[name] = value
    return rows, facts


def _frames(path: Path) -> int:
    """Return how many pages of a file's write-ahead log were committed: up to the last one that ends a
    transaction."""
    with suppress(FileNotFoundError), open(f"{path}-wal", "rb") as log:
        frame = _PAGE_BYTES + 24
        for place in reversed(range((os.fstat(log.fileno()).st_size - 32) // frame)):
            log.seek(32 + place * frame)
            page, size = log.read(4), log.read(4)  # of the database, after its last page of a transaction
            if any(size) or not any(page):  # or zeros in its place
                return place + 1
    return 0


def _inode(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_ino
    return -1


def _code(error: Exception) -> int | None:
    """Return SQLite's code of an error; those of Python's module itself have none."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return code if code is None else code & 0xFF


def _sum(*values: object) -> int:
    total = 0
    for value in values:
        total = zlib.crc32(value if isinstance(value, bytes) else repr(value).encode(errors="replace"), total)
    return total
