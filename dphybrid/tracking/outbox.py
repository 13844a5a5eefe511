"""A run's outbox: one SQLite file, `RUN.db`, holds what MLflow should get until it has arrived.

The training appends records and never waits for a server. A record outlives the process, one with `sync` (and
all before it) also a loss of power. Whoever holds `RUN.lock` sends: the training's own thread, or `dphybrid
sync`. When all has arrived, the file keeps what a later attempt of the run needs.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dphybrid.tracking.base import Record
from dphybrid.tracking.outbox_file import (
    LOST,
    PRIVATE,
    UNREADABLE,
    OutboxFile,
    Row,
    connect,
    fact,
    number,
    rows_where,
    set_facts,
    write_row,
)
from dphybrid.util.errors import counted
from dphybrid.util.files import make_folder
from dphybrid.util.locks import FileLock

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: a record is written at each step


@dataclass(frozen=True)
class Losses:
    """What of a run's record does not reach the server.

    lost: records damaged or missing; refused: records that the server did not take; unkept: lines of metrics
    that could not be written; damaged: files set aside.
    """

    lost: int = 0
    refused: int = 0
    unkept: int = 0
    damaged: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return self != Losses()

    def text(self) -> str:
        """Return it for people, or nothing."""
        counts = {
            "damaged or missing on the way": self.lost,
            "refused by the server": self.refused,
            "not written down (disk full?)": self.unkept,
        }
        parts = [f"{counted(n, 'record')} {what}" for what, n in counts.items() if n]
        parts += [f"{path} was damaged, and more may be missing at its end" for path in self.damaged]
        return "; ".join(parts)


class Outbox:
    """The records of one run, `run_id`, in `folder`. One process appends, from any of its threads.

    new: the run begins here; the file of any other run must be there, else its loss is counted.
    """

    def __init__(self, folder: Path, run_id: str, new: bool = False) -> None:
        self.run_id = run_id
        self.path = folder / f"{run_id}.db"
        self._file = OutboxFile(self.path, new)
        self._do = self._file.do
        self._lock = threading.Lock()
        self._steps: dict[str, int] | None = None
        self._unkept = 0
        self._sending: FileLock | None = None

    def set_destination(self, **values: str) -> None:
        """Keep where the records go: tracking_uri, experiment_id."""
        self._do(lambda database: set_facts(database, values), sync=True)

    def destination(self) -> dict[str, str]:
        """Return what `set_destination` kept, or nothing."""
        names = ("tracking_uri", "experiment_id")
        return self._do(
            lambda database: {name: value for name in names if (value := fact(database, name)) is not None}
        )

    def append(self, record: Record, *, content: bytes | None = None, sync: bool = False) -> int:
        """Add a record, the content of its file, and the time; return its number. Raises OSError."""
        values = {"t": int(time.time() * 1000), **record}
        time_ms, op = values.pop("t"), values.pop("op")
        body, unkept = _ENCODER.encode(values), self._unkept

        def insert(database: sqlite3.Connection) -> int:
            # A fact, as records that have arrived are removed, and no number may come twice.
            n = number(database, "newest") + 1
            write_row(database, (n, time_ms, op, body, None, content))
            set_facts(database, {"newest": n})
            if unkept:
                set_facts(database, {"unkept": number(database, "unkept") + unkept})
            return n

        n = self._do(insert, sync=sync)
        self._unkept -= unkept
        return n

    def append_metrics(self, metrics: Mapping[str, float], step: int, details: Collection[str] = ()) -> None:
        """Add metrics at a step, without those that an earlier attempt of this run recorded at that step or a
        later one.

        details: names of those that are kept for the table of details instead of being sent as metrics.
        """
        earlier = self._earlier()
        kept = {name: value for name, value in metrics.items() if name not in earlier or step > earlier[name]}
        if not kept:
            return
        record: Record = {"op": "metrics", "step": step}
        record["values"] = {name: value for name, value in kept.items() if name not in details}
        record["details"] = {name: value for name, value in kept.items() if name in details}
        self.append(record)

    def count_unkept(self) -> None:
        """Note that a line of metrics could not be written."""
        self._unkept += 1

    def sync(self) -> None:
        """Have all records so far outlive a loss of power."""
        self._do(lambda database: set_facts(database, {"synced": time.time_ns()}), sync=True)

    def _earlier(self) -> dict[str, int]:
        """Return the highest step of each metric, of before this object's first append."""
        with self._lock:
            if self._steps is None:
                self._steps = self._do(_steps)
            return self._steps

    def pending(self, limit: int) -> list[Record]:
        """Return up to `limit` records that have not arrived, oldest first."""

        def select(database: sqlite3.Connection) -> list[Record]:
            condition = "n > ? AND kept IS NULL ORDER BY n LIMIT ?"
            return list(map(_record, rows_where(database, condition, number(database, "sent"), limit)))

        return self._do(select)

    def counts(self) -> tuple[int, int]:
        """Return how many records wait and how many were refused; a file that cannot be read waits. Changes
        nothing."""
        try:
            with closing(connect(self.path)) as database:
                query = "SELECT count(*) FROM records WHERE kept IS NOT NULL AND op != ?"
                ((refused,),) = database.execute(query, (LOST,))
                return number(database, "newest") - number(database, "sent"), refused
        except UNREADABLE:
            return 1, 0

    def acknowledge(self, n: int) -> None:
        """Note that everything up to this number has arrived."""
        self._do(lambda database: set_facts(database, {"sent": n}))

    def refuse(self, record: Record, reason: str) -> None:
        """Keep a record that the server does not take, out of the others' way."""

        def mark(database: sqlite3.Connection) -> None:
            for row in list(rows_where(database, "n = ?", record["n"])):
                write_row(database, (*row[:4], reason[:500], row[5]))

        self._do(mark, sync=True)

    def refused(self) -> list[Record]:
        """Return the records that the server refused."""
        condition = "kept IS NOT NULL AND op != ? ORDER BY n"
        return self._do(lambda database: list(map(_record, rows_where(database, condition, LOST))))

    def offer_again(self, kinds: Collection[str]) -> None:
        """Put refused records of these kinds behind the others."""
        again = [record for record in self.refused() if record["op"] in kinds]
        numbers = [(record.pop("n"),) for record in again]
        for record in again:
            # The table of details has arrived: one of a later record alone would take its place.
            self.append({**record, "details": {}, "content": None}, content=record["content"])
        if again:
            self._do(lambda database: database.executemany("DELETE FROM records WHERE n = ?", numbers))
            self.append({"op": "losses", "text": ""}, sync=True)  # told anew where something is refused again

    def details(self) -> Iterator[tuple[int, int, str, float]]:
        """Yield (milliseconds, step, name, value) of the details since the records were last cleared."""
        after = self._do(lambda database: number(database, "cleared"))

        def some(database: sqlite3.Connection) -> list[Row]:
            return list(rows_where(database, "n > ? AND op = 'metrics' ORDER BY n LIMIT 1000", after))

        while found := self._do(some):
            after = found[-1][0]
            for record in map(_record, found):
                for name, value in record["details"].items():
                    yield record["t"], record["step"], name, value

    def losses(self) -> Losses:
        """Return all that the run has lost so far."""

        def count(database: sqlite3.Connection) -> tuple[int, int, int]:
            query = "SELECT count(*) FILTER (WHERE op = ?), count(*) FROM records WHERE kept IS NOT NULL"
            ((lost, kept),) = database.execute(query, (LOST,))
            return lost, kept - lost, self._unkept + number(database, "unkept")

        return Losses(*self._do(count), tuple(self._file.set_aside()))

    def clear(self) -> None:
        """Remove the records, all of which have arrived. What a later attempt needs stays: the highest steps,
        what was refused or lost."""

        def remove(database: sqlite3.Connection) -> None:
            # Refused records stay, and their details have arrived with the others'.
            newest = number(database, "newest")
            set_facts(database, {"steps": json.dumps(_steps(database)), "cleared": newest})
            database.execute("DELETE FROM records WHERE kept IS NULL")

        self._do(remove, sync=True)
        self._file.shrink()

    def hold(self) -> bool:
        """Become the one that sends, unless somebody is. The kernel ends this with the process."""
        if self._sending is None:
            make_folder(self.path.parent, 0o700)
            lock = FileLock(self.path.with_suffix(".lock"), mode=PRIVATE)
            if not lock.acquire():
                return False
            self._sending = lock
        return True

    def release(self) -> None:
        """Close the file and let somebody else send."""
        self._file.close()
        if self._sending is not None:
            self._sending.release()
            self._sending = None


def outboxes(folder: Path) -> list[Outbox]:
    """Return the outboxes of a folder, oldest first."""
    # Neither files in the making nor those that were set aside.
    paths = [path for path in folder.glob("[!.]*.db") if ".damaged-" not in path.name]
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


def _record(row: Row) -> Record:
    n, time_ms, op, body, _, content = row
    return {"n": n, "t": time_ms, "op": op, **json.loads(body), "content": content}


def _steps(database: sqlite3.Connection) -> dict[str, int]:
    """Return the highest step of each metric so far; a process that was killed leaves the records
    themselves."""
    steps: dict[str, int] = json.loads(fact(database, "steps") or "{}")
    for record in map(_record, rows_where(database, "op = 'metrics' ORDER BY n")):
        for name in record["values"] | record["details"]:
            steps[name] = max(record["step"], steps.get(name, record["step"]))
    return steps
