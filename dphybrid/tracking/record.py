"""A run's record: `record.jsonl` in its folder, with a line of JSON for each record, appended and never
changed.

`pandas.read_json(file, lines=True)` reads it: `op` is the kind of record, `t` its time in milliseconds,
`step` and a column for each metric where op is metrics. Files that a record names are below `record/`, or
elsewhere in the run's folder. Each line ends with a checksum of its text, so that a damaged line costs no
other.

Whoever copies the record to MLflow holds a lock on it and keeps in `record.sent` how much has arrived.
"""

import errno
import json
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import write_bytes
from dphybrid.util.locks import FileLock, is_held
from dphybrid.util.pages import Page

Record = dict[str, Any]
"""op: the kind of record; the other keys depend on it. A record that was read also has n, where its line
begins, and end, where the next one does."""

RECORD, SENT = "record.jsonl", "record.sent"
_SUM = b',"crc":"%08x"}\n'
_SUM_BYTES = len(_SUM % 0)
_MODE = 0o600  # as others could read params and paths in it
_MAX_REFUSED = 1000
"""More refused records are counted, but not sent again by a later `dphybrid sync`."""
DAMAGED = "damaged"
"""The op of a record whose line is damaged."""
_KEYS = ("op", "t", "step", "crc", "n", "end")
"""The keys of a line of metrics besides their names."""
_ENCODER = json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False
)  # made once: every step writes a record


@dataclass(frozen=True)
class Losses:
    """What MLflow lacks of a record.

    Attributes:
        refused: Records that the server refused.
        damaged: Lines.
        unkept: Lines that could not be written.
    """

    refused: int = 0
    damaged: int = 0
    unkept: int = 0

    def __bool__(self) -> bool:
        return self != Losses()

    def text(self) -> str:
        """Return the losses in words, or ""."""
        counts = {
            "refused by the server": self.refused,
            "damaged on the disk": self.damaged,
            "not written down (disk full?)": self.unkept,
        }
        return "; ".join(f"{counted(n, 'record')} {what}" for what, n in counts.items() if n)


class Sent(Page):
    """`record.sent`: how much of a record MLflow has.

    Attributes:
        offset: Of the first byte that has not arrived.
        refused: Offset of a refused record -> the server's reason.
        more_refused: The number of further ones.
        damaged: Unreadable lines.
        unkept: Lines that were not written.
        told: The text about lost records on the run's page in MLflow.
        closed: The run has ended, and everything has arrived.
    """

    model_config = ConfigDict(frozen=False)

    offset: int = Field(default=0, ge=0)
    refused: dict[int, str] = Field(default_factory=dict)
    more_refused: int = 0
    damaged: int = 0
    unkept: int = 0
    told: str = ""
    closed: bool = False

    def losses(self) -> Losses:
        return Losses(len(self.refused) + self.more_refused, self.damaged, self.unkept)

    def refuse(self, offset: int, reason: str) -> None:
        if len(self.refused) < _MAX_REFUSED:
            self.refused[offset] = reason[:500]
        else:
            self.more_refused += 1


class RecordFile:
    """The record of the run in `folder`. Only one process appends; it may do so from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / RECORD
        self._handle: int | None = None
        self._appending = threading.Lock()
        self._unkept = 0
        self._lock: FileLock | None = None

    def rewrite(self, address: Record) -> None:
        """Give the record another address, whence nothing of it has arrived. Leaves out the earlier address,
        and the models that the run has registered there."""
        lines = [{"t": int(time.time() * 1000), **address}]
        lines += [line for line in self.all() if line["op"] not in ("run", "register", DAMAGED)]
        kept = [{name: value for name, value in line.items() if name not in ("n", "end")} for line in lines]
        write_bytes(self.path, b"".join(as_line(_ENCODER.encode(line).encode()) for line in kept), _MODE)
        (self.folder / SENT).unlink(missing_ok=True)

    def append(self, record: Record, *, sync: bool = False) -> int:
        """Append a record with the current time; return where its line begins. sync: it, and all before it,
        must survive a power loss. Raises OSError, and leaves no part of the line then."""
        body = _ENCODER.encode({"op": record["op"], "t": int(time.time() * 1000), **record})
        with self._appending:
            if self._unkept:
                self._write({"op": "unkept", "count": self._unkept})
                self._unkept = 0
            begin = self._write_line(body.encode(errors="replace"))
            if sync:
                os.fsync(self._opened())
        return begin

    def count_unkept(self) -> None:
        """Count a record that could not be written; the next one that can be is preceded by the count."""
        with self._appending:
            self._unkept += 1

    def sync(self) -> None:
        """Make all records so far survive a power loss."""
        with self._appending:
            os.fsync(self._opened())

    def mend(self) -> None:
        """End a line that a crash cut off, so that it costs no other. Call it only as the one that appends,
        or while nobody does."""
        with self._appending:
            self._opened()

    def read(self, offset: int, limit: int) -> list[Record]:
        """Return up to `limit` records from `offset` on. A damaged line gives a record with op `DAMAGED`."""
        found = list[Record]()
        with self.path.open("rb") as file:
            file.seek(offset)
            while len(found) < limit and (line := file.readline()).endswith(b"\n"):
                found.append({**(of_line(line) or {"op": DAMAGED}), "n": offset, "end": offset + len(line)})
                offset += len(line)
        return found

    def all(self) -> Iterator[Record]:
        """Return all records; the file may be damaged."""
        offset, limit = 0, 10
        while found := self.read(offset, limit):
            yield from found
            offset, limit = found[-1]["end"], 1000

    def last_steps(self) -> dict[str, int]:
        """Return metric -> the last step with a value."""
        steps: dict[str, int] = {}
        for record in self.all():
            if record["op"] == "metrics":
                for name in metrics_of(record):
                    steps[name] = max(steps.get(name, 0), record["step"])
        return steps

    def last_summary(self) -> dict[str, float]:
        """Return the last value of each metric of the run as a whole."""
        found: dict[str, float] = {}
        for record in self.all():
            if record["op"] == "summary":
                found |= metrics_of(record)
        return found

    def destination(self) -> Record:
        """Return the run's address in MLflow: run_id, experiment_id, tracking_uri. Empty if the run is not
        recorded there. Raises UserError if the lines with the address are damaged."""
        damaged = False
        for record in self.all() if self.path.is_file() else ():
            if record["op"] == "run":
                return record if record.get("experiment_id") else {}
            damaged |= record["op"] == DAMAGED
        if damaged:
            raise UserError(
                f"{self.path}: is damaged, and no other line says where MLflow has the run; restore it, or "
                "continue the run with --tracking none"
            )
        return {}

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def sent(self) -> Sent:
        """Return how much has arrived; nothing, if the page is missing, damaged or of a longer record: a
        record that MLflow gets twice counts once."""
        with suppress(UserError, OSError):
            sent = Sent.read(self.folder / SENT)
            if sent.offset <= self.size:
                return sent
        return Sent()

    def waits(self) -> bool:
        """Return whether MLflow still lacks records that it should get, as far as the record can be read."""
        try:
            offset = self.sent().offset
            return offset < self.size and (offset > 0 or bool(self.destination()))
        except UserError:
            return True
        except OSError:  # removed meanwhile
            return False

    def save(self, sent: Sent) -> None:
        """Note how much has arrived."""
        sent.write(self.folder / SENT)

    def hold(self) -> bool:
        """Take the right to send; return whether this process has it now. The kernel releases it when the
        process ends."""
        if self._lock is None:
            lock = FileLock(self.path, mode=_MODE)
            if not lock.acquire():
                return False
            self._lock = lock
        return True

    def release(self) -> None:
        """Close the file and give up the right to send."""
        with self._appending:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _opened(self) -> int:
        if self._handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                os.write(handle, b"\n")
            self._handle = handle
        return self._handle

    def _write(self, record: Record) -> None:
        self._write_line(
            _ENCODER.encode({"op": record["op"], "t": int(time.time() * 1000), **record}).encode()
        )

    def _write_line(self, body: bytes) -> int:
        handle = self._opened()
        begin = os.fstat(handle).st_size
        line = as_line(body)
        try:
            # In one call: a process that is killed leaves the whole line or nothing.
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(handle, begin)
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
        return begin


def as_line(body: bytes) -> bytes:
    """Return the line of a JSON object, with its checksum."""
    return body[:-1] + _SUM % zlib.crc32(body)


def of_line(line: bytes) -> Record | None:
    """Return the object of a line, without its checksum; None if the line is damaged."""
    body = line[:-_SUM_BYTES] + b"}"
    return dict(json.loads(body)) if line[-_SUM_BYTES:] == _SUM % zlib.crc32(body) else None


def records(folders: Iterable[Path]) -> list[RecordFile]:
    """Return the records of runs, oldest first. folders: of the runs, which may have no record."""
    found = []
    for folder in folders:
        with suppress(FileNotFoundError):  # no record, or the run was removed meanwhile
            found.append(((folder / RECORD).stat().st_mtime, folder))
    return [RecordFile(folder) for _, folder in sorted(found)]


def waiting(folders: Iterable[Path]) -> int:
    """Return the number of runs whose records wait for MLflow and are sent by no process."""
    return sum(record.waits() and not is_held(record.path) for record in records(folders))


def of_metrics(metrics: Mapping[str, float], step: int, op: str = "metrics") -> Record:
    """Return the record of metrics at a step."""
    # A metric must not take the place of a key of the line.
    return {"op": op, "step": step} | {
        f"metric/{name}" if name in _KEYS else name: value for name, value in metrics.items()
    }


def metrics_of(record: Record) -> dict[str, float]:
    """Return the metrics of a record."""
    return {name: value for name, value in record.items() if name not in _KEYS}
