"""Copies a run's record to MLflow from one background thread, so that the training never waits.

The record is the queue: the copier reads it from an offset on, sends what it finds, and notes the new offset.
After a crash it sends some lines again, which changes nothing in MLflow.
"""

import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dphybrid.tracking.record import METRICS, RECORD, Line, Sent, metrics_of, read, waits
from dphybrid.util.errors import counted
from dphybrid.util.locks import take
from dphybrid.util.text import masked

_EVERY_S = 2.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 15.0
_REFUSED_RETRIES_S = (0.1, 0.5, 2.0)
"""Waits before a refused call is repeated: MLflow also refuses when two runs write the same row at once."""
_BATCH_POINTS = 1000
Batch = list[tuple[Line | None, int]]
"""Lines, None for a damaged one, and the offset of each one's end."""
_log = logging.getLogger(__name__)


class Refused(Exception):
    """MLflow answers, and does not accept a line."""


class Copier:
    """Copies the record in `folder` until `finish`. write: sends one line, or several with points. It raises
    Refused, or any other error to be asked again later.

    Attributes:
        sent: How much has arrived.
        trouble: The error of the latest attempt, or "".
    """

    def __init__(self, folder: Path, write: Callable[[list[Line]], None]) -> None:
        self.folder, self._write = folder, write
        self.sent = Sent.read(folder)
        self.trouble = ""
        self._skipped_before = len(self.sent.skipped)
        self._deadline: float | None = None
        self._bell = threading.Event()
        # In the caller's context, so that warnings appear in the log of the caller's flow run. A daemon: a
        # server that never answers must not keep the process.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._follow,), name="dphybrid-copy", daemon=True)
        self._thread.start()

    def wait(self, offset: int, seconds: float) -> bool:
        """Wait until the lines before `offset` have arrived, at most `seconds`; return whether they have."""
        end = time.monotonic() + seconds
        self._bell.set()
        while self.sent.offset < offset and time.monotonic() < end:
            time.sleep(0.02)
        return self.sent.offset >= offset

    def finish(self, seconds: float) -> str:
        """Copy the remaining lines in at most `seconds` and stop; return what MLflow lacks, or ""."""
        self._deadline = time.monotonic() + seconds
        self._bell.set()
        self._thread.join(seconds)
        if waits(self.folder):
            why = self.trouble or f"not finished within {seconds:g} s"
            return f"MLflow lacks the rest of the record ({why}); `dphybrid sync` copies it"
        skipped = list(self.sent.skipped.values())[self._skipped_before :]
        return f"MLflow lacks {counted(len(skipped), 'line')} of the record ({skipped[0]})" if skipped else ""

    def _follow(self) -> None:
        retry_s, held = _FIRST_RETRY_S, None
        try:
            while self._deadline is None or time.monotonic() < self._deadline:
                finishing = self._deadline is not None  # before the pass, which then sees every line
                try:
                    if held is None:
                        if (held := take(self.folder / RECORD)) is None:
                            raise BlockingIOError("another process is copying this run's record")
                        self.sent = Sent.read(self.folder)  # it may have copied a part meanwhile
                    self._pass()
                except Exception as error:  # noqa: BLE001 - whatever MLflow or its client raises: ask again
                    if not self.trouble:
                        told = "MLflow does not take the record (%s); it is kept and copied later"
                        _log.warning(told, _short(error))
                    self.trouble = _short(error)
                    self._sleep(retry_s)
                    retry_s = min(2 * retry_s, _LAST_RETRY_S)
                    continue
                if self.trouble:
                    _log.warning("MLflow takes the record of %s again", self.folder.name)
                self.trouble, retry_s = "", _FIRST_RETRY_S
                if finishing:
                    return
                self._bell.wait(_EVERY_S)  # `finish` rings it, during the pass, too
                self._bell.clear()
        finally:
            if held is not None:
                os.close(held)

    def _sleep(self, seconds: float) -> None:
        """Wait before another attempt. The bell ends the wait, but not after `finish` has begun."""
        if self._deadline is not None:
            seconds = max(0.0, min(seconds, self._deadline - time.monotonic()))
            self._bell.clear()
        self._bell.wait(seconds)
        self._bell.clear()

    def _pass(self) -> None:
        """Copy all whole lines from the offset on."""
        for batch in _batches(read(self.folder, self.sent.offset)):
            self._send(batch)
            if self._deadline is not None and time.monotonic() > self._deadline:
                return  # another process may copy by now; it gets these lines again
            self.sent.offset = batch[-1][1]
            self.sent.write(self.folder)

    def _send(self, batch: Batch) -> None:
        lines, end = [line for line, _ in batch if line is not None], batch[-1][1]
        if not lines:
            self._skip(end, "damaged")
            return
        for wait_s in (*_REFUSED_RETRIES_S, None):
            try:
                self._write(lines)
                return
            except Refused as error:
                if len(batch) > 1:  # one wrong value makes MLflow refuse the whole call
                    for pair in batch:
                        self._send([pair])
                    return
                if wait_s is None:
                    self._skip(end, _short(error))
                    return
            time.sleep(wait_s)

    def _skip(self, end: int, why: str) -> None:
        _log.warning("%s: MLflow lacks the line at byte %s of the record: %s", self.folder.name, end, why)
        self.sent.skipped[end] = why


def _batches(lines: Iterable[tuple[Line | None, int]]) -> Iterator[Batch]:
    """Yield consecutive lines with points together, up to a call's limit, and every other line alone."""
    batch, points = Batch(), 0
    for line, end in lines:
        size = len(metrics_of(line)) if line is not None and line["op"] in METRICS else 0
        if batch and (not size or points + size > _BATCH_POINTS):
            yield batch
            batch, points = [], 0
        if size:
            batch, points = [*batch, (line, end)], points + size
        else:
            yield [(line, end)]
    if batch:
        yield batch


def _short(error: Exception) -> str:
    return masked(" ".join(str(error).split()) or type(error).__name__)[:200]
