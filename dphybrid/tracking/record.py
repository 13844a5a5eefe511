"""A run's record: `record.jsonl` in its folder, with a line of JSON for each record, appended and never
changed.

`pandas.read_json(file, lines=True)` reads it: `op` is the kind of record, `t` its time in milliseconds,
`step` and a column for each metric where op is metrics. Files that a record names are in the run's folder. A
line counts once its newline is written.

MLflow gets a copy. Whoever sends it holds a lock on the record, and keeps in `record.sent` how much has
arrived.
"""

import errno
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dphybrid.util.files import replacing

Line = dict[str, Any]
"""op: the kind of record; t: its time; the other keys depend on the kind."""

RECORD, SENT = "record.jsonl", "record.sent"
METRICS = ("metrics", "summary")
"""Kinds of lines with points."""
_KEYS = ("op", "t", "step")
"""The keys of a line of metrics besides their names."""
_MODE = 0o600  # as others could read params and paths in it
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class RecordFile:
    """The record of the run in `folder`. Only one process appends; it may do so from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / RECORD
        self._handle: int | None = None
        self._appending = threading.Lock()

    def append(self, line: Mapping[str, Any], *, sync: bool = False) -> int:
        """Append a line with the current time; return the offset of its end. sync: it, and all before it,
        must survive a power loss. Raises OSError, and leaves no part of the line then."""
        text = _text({"op": line["op"], "t": int(time.time() * 1000), **line})
        with self._appending:
            handle = self._opened()
            begin = os.fstat(handle).st_size
            try:
                # In one call: a process that is killed leaves the whole line or nothing.
                if os.write(handle, text) < len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(handle, begin)
                raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
            if sync:
                os.fsync(handle)
        return begin + len(text)

    def sync(self) -> None:
        """Make all lines so far survive a power loss."""
        with self._appending:
            os.fsync(self._opened())

    def close(self) -> None:
        """Close the file."""
        with self._appending:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
            # A last line without its newline is of a killed process, and no reader has seen it. Mapped: only
            # the end of a long record is read.
            if os.fstat(handle).st_size:
                with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as lines:
                    end = lines.rfind(b"\n") + 1
                os.ftruncate(handle, end)
            self._handle = handle
        return self._handle


@dataclass
class Sent:
    """`record.sent`: how much of a record MLflow has.

    Attributes:
        offset: End of the last line that has arrived.
        skipped: End of a line -> why MLflow lacks it.
    """

    offset: int = 0
    skipped: dict[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Sent":
        """Return what was noted; nothing if that is missing, damaged or of a longer record: then all is sent
        again, and a line that MLflow gets twice counts once."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            page = json.loads((folder / SENT).read_bytes())
            if 0 <= page["offset"] <= (folder / RECORD).stat().st_size:
                return cls(page["offset"], {int(end): str(why) for end, why in page["skipped"].items()})
        return cls()

    def write(self, folder: Path) -> None:
        """Note it. Not synced: after a power loss an older offset sends some lines again."""
        partial = folder / f".{SENT}"
        partial.write_text(json.dumps({"offset": self.offset, "skipped": self.skipped}), encoding="utf-8")
        os.replace(partial, folder / SENT)


def read(folder: Path, offset: int = 0) -> Iterator[tuple[Line | None, int]]:
    """Yield each line of a record from `offset` on, and the offset of its end; None for a damaged line."""
    with (folder / RECORD).open("rb") as file:
        file.seek(offset)
        for text in file:
            if not text.endswith(b"\n"):
                return
            offset += len(text)
            yield _parsed(text), offset


def addresses(folder: Path, before: int | None = None) -> list[Line]:
    """Return the lines that say where MLflow has a run, the newest last: run_id, experiment_id, tracking_uri.
    A resumed run with other values has a new one. before: only of lines that begin before this offset."""
    return [line for line in _of_kind(folder, "run", before) if line.get("experiment_id")]


def destination(folder: Path) -> Line:
    """Return the newest address of a run in MLflow; empty if it is not recorded there."""
    return next(reversed(addresses(folder)), {})


def last_status(folder: Path) -> str:
    """Return the status that a record says last, such as FAILED; "" if it says none."""
    statuses = [str(line.get("status", "")) for line in _of_kind(folder, "status")]
    return statuses[-1] if statuses else ""


def _of_kind(folder: Path, op: str, before: int | None = None) -> Iterator[Line]:
    """Yield a record's lines of a kind; the other ones are not parsed, which takes long."""
    begin, offset = f'{{"op":"{op}",'.encode(), 0
    with suppress(FileNotFoundError), (folder / RECORD).open("rb") as file:
        for text in file:
            if before is not None and offset >= before:
                return
            if text.startswith(begin) and (line := _parsed(text)):
                yield line
            offset += len(text)


def waits(folder: Path) -> bool:
    """Return whether MLflow still lacks lines that it should get."""
    with suppress(OSError):  # removed meanwhile
        offset = Sent.read(folder).offset
        return next(read(folder, offset), None) is not None and bool(offset or addresses(folder))
    return False


def give_address(folder: Path, address: Line) -> None:
    """Give a record from elsewhere another address, whence nothing of it has arrived. Leaves out its own
    addresses, and the models that the run has registered there."""
    lines = [line for line, _ in read(folder) if line and line["op"] not in ("run", "register")]
    first = {"op": address["op"], "t": int(time.time() * 1000), **address}
    with replacing(folder / RECORD) as partial:
        partial.touch(_MODE)
        partial.write_bytes(b"".join(map(_text, [first, *lines])))
    (folder / SENT).unlink(missing_ok=True)


def of_metrics(metrics: Mapping[str, float], step: int, op: str = "metrics") -> Line:
    """Return the line of metrics, numbers of any library, at a step."""
    # A metric must not take the place of a key of the line.
    named = {f"metric/{name}" if name in _KEYS else name: float(n) for name, n in metrics.items()}
    return {"op": op, "step": step, **named}


def metrics_of(line: Line) -> dict[str, float]:
    """Return the metrics of a line."""
    return {name: value for name, value in line.items() if name not in _KEYS}


def _text(line: Mapping[str, Any]) -> bytes:
    return _encode(line).encode(errors="replace") + b"\n"


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    known = isinstance(line, dict) and isinstance(line.get("op"), str) and isinstance(line.get("t"), int)
    return line if known else None
