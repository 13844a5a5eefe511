"""A run's record on its way to the server: an append-only file that outlives the process, and a mark of what
has arrived.

Beside each other in one folder, for run RUN: `RUN.jsonl` (records in order, each with its number and a
checksum), `RUN.count` (number of the newest one, so that a missing end is noticed), `RUN.sent` (number and
place of the newest that arrived), `RUN.lost` (how many never will), `RUN.json` (where they go),
`RUN.steps.json` (highest step of each metric), `RUN.refused.jsonl` (what was set aside: damaged, or refused
by the server), `RUN.files/` (contents that wait), `RUN.lock` (held by the one that sends).

One class writes them, in an order that loses nothing wherever it is cut off.
"""

import contextlib
import json
import os
import threading
import time
import uuid
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dphybrid.tracking.lines import (
    PRIVATE,
    count_page,
    decode,
    encode,
    number_of,
    private,
    read_page,
    write_page,
    write_whole,
)
from dphybrid.util.files import sync
from dphybrid.util.locks import FileLock

Record = dict[str, Any]
"""op: what it is; n: its number; t: when it was written (ms); and the values of its kind."""

Mark = tuple[int, int]
"""Number of a record and the place in the file behind it."""

Point = list[Any]
"""Value, step and time (ms) of a metric."""

EVALUATED = "valid/"
"""Metrics whose points are kept for the checkpoints that they belong to."""


@dataclass(frozen=True)
class Losses:
    """What of a run's record does not reach the server.

    lost: records damaged or missing on the way; refused: records that the server did not take; unkept: lines
    of metrics that could not be written down at all; pages: damaged pages that say what should be there;
    aside: file of what was set aside.
    """

    lost: int
    refused: int
    unkept: int
    pages: tuple[str, ...]
    aside: Path

    def __bool__(self) -> bool:
        return bool(self.lost or self.refused or self.unkept or self.pages)

    def text(self) -> str:
        """Return it for people, or nothing."""
        parts = [f"{_records(self.lost)} damaged or missing on the way"] if self.lost else []
        parts += [f"{_records(self.refused)} refused by the server"] if self.refused else []
        parts += [f"{_records(self.unkept)} not written down (disk full?)"] if self.unkept else []
        parts += (
            [f"damaged: {', '.join(self.pages)}, so more may be missing at the end"] if self.pages else []
        )
        kept = f"; what there is of them: {self.aside}" if self.lost or self.refused else ""
        return "; ".join(parts) + kept


class Journal:
    """The records of one run. One writer process, any number of its threads; whoever holds the lock sends."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.run_id = run_id
        self._folder = folder
        self._writing = threading.Lock()
        self._file: int | None = None
        self._count_file: int | None = None
        self._number = 0
        self._torn = False
        self._unkept = 0
        self._sending: FileLock | None = None
        self._fresh_steps: dict[str, int] = {}

    @cached_property
    def _earlier(self) -> dict[str, int]:
        """Highest step of each metric that earlier attempts of this run recorded."""
        return self._history[0]

    @cached_property
    def _history(self) -> tuple[dict[str, int], dict[str, list[Point]]]:
        """Highest step of each metric of earlier attempts, and the points of the evaluations."""
        found: tuple[dict[str, int], dict[str, list[Point]]] = read_page(self._path("steps.json"))[0] or (
            {},
            {},
        )
        steps, points = found
        for record in self._records():  # a process that was killed left no page of steps
            if record["op"] == "metrics":
                for name, value in (*record["values"].items(), *record.get("details", {}).items()):
                    steps[name] = max(record["step"], steps.get(name, record["step"]))
                    if name.startswith(EVALUATED) and [value, record["step"], record["t"]] not in points.get(
                        name, []
                    ):
                        points.setdefault(name, []).append([value, record["step"], record["t"]])
        return steps, points

    def point(self, name: str, value: float, step: int) -> Point | None:
        """Return the newest point of an evaluation's metric, up to a step, that has this value."""
        found = [
            point
            for point in self._history[1].get(name, [])
            if point[1] <= step and repr(point[0]) == repr(value)
        ]
        return found[-1] if found else None

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self.run_id}.{suffix}"

    @property
    def lines(self) -> Path:
        return self._path("jsonl")

    @property
    def aside(self) -> Path:
        """File of records that were set aside, each with the reason."""
        return self._path("refused.jsonl")

    @property
    def contents(self) -> Path:
        """Folder of what has no file of its own: texts and pictures that wait."""
        return self._path("files")

    def set_destination(self, **values: str) -> None:
        """Keep where the records go: tracking_uri, experiment_id."""
        self._make_folder()
        write_page(self._path("json"), values, sync=True)

    def destination(self) -> dict[str, str]:
        """Return what `set_destination` kept, or nothing."""
        values: dict[str, str] = read_page(self._path("json"))[0] or {}
        return values

    def append(self, record: Record, *, sync: bool = False) -> int:
        """Add a record and its time; return its number. OSError reaches the caller.

        It outlives the process when this returns, and with `sync` a loss of power, with all before it.
        """
        record = {"t": int(time.time() * 1000), **record}
        with self._writing:
            if self._file is None:
                self._open()
            assert self._file is not None
            assert self._count_file is not None
            number = self._number + 1
            line = encode(number, record)
            self._write(line)
            if os.fstat(self._file).st_nlink == 0:  # another process put the records in order meanwhile
                self._open()
                self._write(line)
            self._number = number
            self._write_count()
            if sync:
                self._sync()
            return number

    def sync(self) -> None:
        """Have all records so far outlive a loss of power."""
        with self._writing:
            if self._file is not None:
                self._sync()

    def _sync(self) -> None:
        assert self._file is not None
        assert self._count_file is not None
        os.fsync(self._file)
        os.fsync(self._count_file)
        sync(self._folder)

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        line = b"\n" + line if self._torn else line
        self._torn = True  # until the whole line is there: the next one starts anew
        while line:
            line = line[os.write(self._file, line) :]
        self._torn = False

    def _open(self) -> None:
        self._shut()
        self._make_folder()
        # first: without it, an end could be missing
        self._count_file = private(str(self._path("count")), os.O_RDWR | os.O_CREAT)
        there = (number_of(line) or 0 for line in _lines(self.lines))
        newest = max(self._count(), self._sent()[0], self._lost()[1], *there, 0)
        self._file = private(str(self.lines), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(self._file).st_size
        if size:
            os.lseek(self._file, -1, os.SEEK_END)
        self._torn = size > 0 and os.read(self._file, 1) != b"\n"
        self._number = newest
        if newest == 0:
            self._write_count()

    def _write_count(self) -> None:
        assert self._count_file is not None
        os.lseek(self._count_file, 0, os.SEEK_SET)
        os.write(self._count_file, count_page(self._number))

    def _shut(self) -> None:
        for handle in (self._file, self._count_file):
            if handle is not None:
                os.close(handle)
        self._file = self._count_file = None

    def _make_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def append_metrics(self, metrics: Mapping[str, float], step: int, details: Collection[str] = ()) -> None:
        """Add metrics at a step, without those that an earlier attempt of this run recorded at that step or a
        later one.

        details: names of those that are kept for the table of details instead of being sent as metrics.
        """
        earlier, fresh, now_ms = self._earlier, self._fresh_steps, int(time.time() * 1000)
        kept = {name: value for name, value in metrics.items() if name not in earlier or step > earlier[name]}
        if not kept:
            return
        record: Record = {"t": now_ms, "op": "metrics", "step": step, "values": kept}
        if details:
            record["values"] = {name: value for name, value in kept.items() if name not in details}
            record["details"] = {name: value for name, value in kept.items() if name in details}
        self.append(record)
        for name, value in kept.items():
            if step > fresh.get(name, -1):
                fresh[name] = step
            if name.startswith(EVALUATED):
                self._history[1].setdefault(name, []).append([value, step, now_ms])

    def count_unkept(self) -> None:
        """Note that a line of metrics could not be written down."""
        self._unkept += 1

    def keep_content(self, name: str, content: bytes) -> tuple[Path, int]:
        """Put content into a file until it has been sent; return the file and the content's checksum."""
        folder = self.contents / uuid.uuid4().hex
        folder.mkdir(parents=True)
        path = folder / Path(name).name
        write_whole(path, content, sync=True)
        return path, zlib.crc32(content)

    def pending(self, limit: int) -> list[tuple[Mark, Record]]:
        """Return up to `limit` records that have not arrived, each with the mark to acknowledge it by."""
        found: list[tuple[Mark, Record]] = []
        number, place = self._sent()
        try:
            with self.lines.open("rb") as file:
                file.seek(max(0, place - 1))
                if place and file.read(1) != b"\n":  # the file is another one now
                    file.seek(0)
                while len(found) < limit and (line := file.readline()).endswith(b"\n"):
                    record = decode(line)
                    if record is not None and record["n"] > number:
                        found.append(((record["n"], file.tell()), record))
        except FileNotFoundError:
            return []
        return found

    def details(self) -> Iterator[tuple[int, int, str, float]]:
        """Yield (milliseconds, step, name, value) of what was kept as details since the records were last
        cleared."""
        for record in self._records():
            for name, value in record.get("details", {}).items():
                yield record["t"], record["step"], name, value

    def acknowledge(self, mark: Mark) -> None:
        """Note that everything up to `mark` has arrived."""
        write_page(self._path("sent"), mark)

    def refuse(self, record: Record, reason: str) -> None:
        """Set a record aside that the server does not take."""
        self._set_aside([{**record, "reason": reason[:500]}])

    def refused(self) -> list[Record]:
        """Return the records set aside because the server refused them."""
        found = (_parsed(line) for line in _lines(self.aside))
        return [record for record in found if record is not None and record["op"] != "damaged"]

    def take_back(self, taken: list[Record]) -> None:
        """Remove refused records that the server has taken after all."""
        left = [line for line in _lines(self.aside) if line and _parsed(line) not in taken]
        if left:
            write_whole(self.aside, b"\n".join(left) + b"\n", sync=True)
        else:
            self.aside.unlink(missing_ok=True)

    def _set_aside(self, records: list[Record]) -> None:
        with open(self.aside, "a", encoding="utf-8", opener=private) as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def hold(self) -> bool:
        """Become the one that sends, unless somebody is; what is damaged is set aside then. The kernel ends
        this with the process."""
        if self._sending is not None:
            return True
        self._make_folder()
        lock = FileLock(self._path("lock"), mode=PRIVATE)
        if not lock.acquire():
            return False
        self._sending = lock
        self.account()
        return True

    def account(self) -> Losses:
        """Find what is missing, set damaged lines aside, put what came out of order in order; return all that
        the run has lost."""
        with self._writing:
            *lines, end = _lines(self.lines) or [b""]
            cut_off = number_of(end) is not None  # whole, but for the end of its line
            lines = [line for line in (*lines, end) if line]
            records = [(number, line) for line in lines if (number := number_of(line)) is not None]
            sent, (lost, up_to) = self._sent()[0], self._lost()
            there = [number for number, _ in records]
            expected = max(self._count(), sent, *there, 0)
            missing = set(range(max(sent, up_to) + 1, expected + 1)).difference(there)
            if missing:
                damaged = [line for line in lines if number_of(line) is None]
                self._set_aside(
                    [
                        {"op": "damaged", "line": line.decode("latin-1"), "reason": "checksum"}
                        for line in damaged
                    ]
                )
                lost += len(missing)
                write_page(self._path("lost"), [lost, expected], sync=True)
            if cut_off or there != sorted(set(there)):
                ordered = dict(sorted(records))
                self._shut()  # before: Windows replaces no open file
                write_whole(self.lines, b"".join(line + b"\n" for line in ordered.values()), sync=True)
            pages = [name for name in ("count", "steps.json", "json") if not read_page(self._path(name))[1]]
            if there and not self._path("count").exists():
                pages.append("count")
        names = tuple(self._path(name).name for name in pages)
        return Losses(lost, len(self.refused()), self._unkept, names, self.aside)

    def release(self) -> None:
        """Let somebody else send; keep the steps for a later attempt."""
        with self._writing:
            if self._file is not None:
                os.fsync(self._file)
            self._shut()
        self._save_steps()
        if self._sending is not None:
            self._sending.release()
            self._sending = None

    def clear(self) -> None:
        """Remove the records, all of which have arrived or were told lost. What tells a later attempt where
        to go on stays."""
        self._save_steps()
        with self._writing:
            self._shut()
            for path in (self.lines, *map(self._path, ("sent", "lost", "count"))):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.contents.rmdir()

    def _records(self) -> Iterator[Record]:
        return (record for line in _lines(self.lines) if (record := decode(line)) is not None)

    def _count(self) -> int:
        return int(read_page(self._path("count"))[0] or 0)

    def _lost(self) -> tuple[int, int]:
        """How many records are known to be lost, and up to which number that has been looked at."""
        lost, up_to = read_page(self._path("lost"))[0] or (0, 0)
        return lost, up_to

    def _sent(self) -> Mark:
        number, place = read_page(self._path("sent"))[0] or (0, 0)
        return number, place

    def _save_steps(self) -> None:
        steps = {**self._earlier, **self._fresh_steps}
        if steps:
            write_page(self._path("steps.json"), [steps, self._history[1]], sync=True)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "op" in record else None


def _records(count: int) -> str:
    return f"{count:,} record{'' if count == 1 else 's'}"
