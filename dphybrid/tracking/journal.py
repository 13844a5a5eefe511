"""A run's record on its way to the server: an append-only file of JSON lines that outlives the process, and a mark of what has arrived.

Beside each other in one folder, for run RUN: `RUN.jsonl` (records in order), `RUN.sent` (bytes that arrived), `RUN.json` (where they go),
`RUN.steps.json` (highest step of each metric), `RUN.refused.jsonl` (what the server will never take), `RUN.lock` (held by the one that sends).
"""

import contextlib
import fcntl
import io
import json
import os
import threading
import time
import uuid
from functools import cached_property
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """The records of one run. One writer process, any number of its threads; whoever holds the lock sends."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.run_id = run_id
        self._folder = folder
        self._writing = threading.Lock()
        self._file: io.BufferedWriter | None = None
        self._lock_file: io.TextIOWrapper | None = None
        self._fresh_steps: dict[str, int] = {}

    @cached_property
    def _earlier(self) -> dict[str, int]:
        """Highest step of each metric that earlier attempts of this run recorded."""
        steps: dict[str, int] = _read_json(self._folder / f"{self.run_id}.steps.json")
        if self.lines.exists():  # a process that was killed left no page of steps
            for line in self.lines.read_bytes().splitlines():
                record = _parse(line)
                if record is not None and record["op"] == "metrics":
                    for name in record["values"]:
                        steps[name] = max(record["step"], steps.get(name, record["step"]))
        return steps

    @property
    def lines(self) -> Path:
        return self._folder / f"{self.run_id}.jsonl"

    @property
    def contents(self) -> Path:
        """Folder of what has no file of its own: texts and pictures that wait."""
        return self._folder / f"{self.run_id}.files"

    def set_destination(self, **values: str) -> None:
        """Keep where the records go: tracking_uri, experiment_id."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _replace(self._folder / f"{self.run_id}.json", json.dumps(values))

    def destination(self) -> dict[str, str]:
        """Return what `set_destination` kept, or nothing."""
        values: dict[str, str] = _read_json(self._folder / f"{self.run_id}.json")
        return values

    def append(self, record: Record) -> None:
        """Add a record and its time; it is on disk when this returns. OSError reaches the caller."""
        line = json.dumps({"t": int(time.time() * 1000), **record}, separators=(",", ":")).encode() + b"\n"
        with self._writing:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = self.lines.open("ab")
                if self._file.tell() and not _ends_with_newline(self.lines):
                    line = b"\n" + line  # what a killed process left of a line is passed over by the reader
            self._file.write(line)
            self._file.flush()

    def append_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Add metrics at a step, without those that an earlier attempt of this run recorded at that step or a later one."""
        kept = {name: value for name, value in metrics.items() if step > self._earlier.get(name, step - 1)}
        for name in kept:
            self._fresh_steps[name] = max(step, self._fresh_steps.get(name, step))
        if kept:
            self.append({"op": "metrics", "step": step, "values": kept})

    def keep_content(self, name: str, content: bytes) -> Path:
        """Put content into a file until it has been sent."""
        folder = self.contents / uuid.uuid4().hex
        folder.mkdir(parents=True)
        path = folder / Path(name).name
        path.write_bytes(content)
        return path

    def pending(self, limit: int) -> list[tuple[int, Record]]:
        """Return up to `limit` records that have not arrived, each with the place in the file behind it."""
        found: list[tuple[int, Record]] = []
        try:
            with self.lines.open("rb") as file:
                file.seek(self._sent())
                while len(found) < limit and (line := file.readline()).endswith(b"\n"):
                    record = _parse(line)
                    if record is not None:
                        found.append((file.tell(), record))
        except FileNotFoundError:
            return []
        return found

    def acknowledge(self, place: int) -> None:
        """Note that everything before `place` has arrived."""
        _replace(self._folder / f"{self.run_id}.sent", str(place))

    def refuse(self, record: Record, reason: str) -> None:
        """Keep aside a record that the server will never take."""
        with (self._folder / f"{self.run_id}.refused.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**record, "reason": reason[:500]}) + "\n")

    def hold(self) -> bool:
        """Become the one that sends, unless somebody is. The kernel ends this with the process."""
        if self._lock_file is not None:
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / f"{self.run_id}.lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._lock_file = file
        return True

    def release(self) -> None:
        """Let somebody else send; keep the steps for a later attempt."""
        with self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None
        self._save_steps()
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def clear(self) -> None:
        """Remove the records, all of which have arrived. What tells a later attempt where to go on stays."""
        self._save_steps()
        with self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None
            for path in (self.lines, self._folder / f"{self.run_id}.sent"):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there is none, or something refused still lies in it
                self.contents.rmdir()

    def _sent(self) -> int:
        try:
            return int((self._folder / f"{self.run_id}.sent").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _save_steps(self) -> None:
        steps = {**self._earlier, **self._fresh_steps}
        if steps:
            _replace(self._folder / f"{self.run_id}.steps.json", json.dumps(steps))


def journals(folder: Path) -> list[Journal]:
    """Return the journals of a folder that hold records, oldest first."""
    return [Journal(folder, path.stem) for path in sorted(_lines_of(folder), key=lambda path: path.stat().st_mtime)]


def waiting(folder: Path) -> int:
    """Return how many runs of a folder hold records that nobody is sending."""
    count = 0
    for path in _lines_of(folder):
        journal = Journal(folder, path.stem)
        if journal.pending(1) and journal.hold():
            journal.release()
            count += 1
    return count


def _lines_of(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.jsonl") if not path.name.endswith(".refused.jsonl")]


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "op" in record else None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def _replace(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
