"""Copies a run's record to MLflow from a background thread: in order, and again until it succeeds, so that
the training never waits."""

import contextlib
import contextvars
import itertools
import logging
import threading
import time
from collections.abc import Callable, Container

from dphybrid.tracking.record import DAMAGED, Losses, Record, RecordFile
from dphybrid.util.text import masked

_SEND_EVERY_S = 2.0
_HEARTBEAT_EVERY_S = 60.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 15.0
_REFUSED_RETRY_S = (0.1, 0.3, 0.9, 2.7)
"""Waits between the attempts to send a record whose refusal may be temporary."""
_BATCH_RECORDS = 200
_RECORD_ERRORS = (KeyError, ValueError, TypeError, AttributeError, FileNotFoundError)
"""Builtin errors that a malformed record causes; trying again would not help."""
METRICS = ("metrics", "summary")
_log = logging.getLogger(__name__)


class Refused(Exception):
    """The server understood a record and refused it. again: the refusal may be temporary, as when two runs
    wrote the same row at the same moment."""

    def __init__(self, text: str, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


class Sender:
    """Sends the records of a file in a background thread, and stores the offset up to which they arrived.

    Args:
        record: The file of records.
        write: Sends several records of metrics, or one of another kind. Raises Refused if the server refuses
            them; after any other error they are sent again.
        beat: Called about once a minute, as a heartbeat.
        again: Kinds of refused records that are sent once more, before all others.
    """

    def __init__(
        self,
        record: RecordFile,
        write: Callable[[list[Record]], None],
        beat: Callable[[], None] = lambda: None,
        again: Container[str] = (),
    ) -> None:
        self._record, self._write, self._beat, self._again = record, write, beat, again
        self._wake = threading.Event()
        self._empty = threading.Condition()
        self._closed = self._ending = False
        # How many `drain` calls were made, and for how many of them the thread has sent all that there was.
        self._asked = self._answered = 0
        self.trouble: str = ""
        """The error of the latest attempt to send, or ""."""
        self.sent = record.sent()
        # In the caller's context, so that this thread's warnings appear in the log of the caller's flow run.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=work, args=(self._work,), name="dphybrid-tracking", daemon=True
        )
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all records so far have arrived, at most `timeout_s` seconds; return whether
        they have."""
        with self._empty:
            self._asked += 1
            wanted = self._asked
            self._wake.set()
            return self._empty.wait_for(
                lambda: self._answered >= wanted or self._closed or not self._thread.is_alive(), timeout_s
            ) and (self._answered >= wanted)

    def close(self, timeout_s: float) -> bool:
        """Drain, end the thread and release the record; return whether everything arrived."""
        arrived = self._end(timeout_s)
        self._record.release()
        return arrived

    def deliver(self, wait_s: float) -> tuple[bool, Losses]:
        """Send the remaining records, what is lost, and the whole file, in at most about `wait_s` seconds,
        and close; return whether they have arrived, and the losses."""
        self._ending = True
        arrived = self.close(wait_s)
        return arrived, self.sent.losses()

    def _end(self, timeout_s: float) -> bool:
        arrived = self.drain(timeout_s)
        self._closed = True
        self._wake.set()
        # A thread that waits for an unreachable server is left behind; as a daemon it ends with the process.
        self._thread.join(1.0 if arrived else 0.1)
        return arrived

    def _work(self) -> None:
        retry_s, beaten = _FIRST_RETRY_S, 0.0
        while not self._closed:
            # Read before sending: a `drain` called from now on may mean records that this pass does not see.
            asked = self._asked
            try:
                if not self._record.hold():
                    raise BlockingIOError("another process is sending this run's records")
                if time.monotonic() - beaten > _HEARTBEAT_EVERY_S:
                    self._beat()
                    beaten = time.monotonic()
                self._send_all()
                if self._ending:
                    self._send_end()
            except Exception as error:  # noqa: BLE001 - any error of the server or its client: warn once, try again
                if not self.trouble:
                    _warn(
                        "the tracking server does not take records (%s); they are kept and sent later",
                        _short(error),
                    )
                self.trouble = _short(error)
                self._wait(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                continue
            if self.trouble:
                _warn("the tracking server takes records again")
            self.trouble, retry_s = "", _FIRST_RETRY_S
            with self._empty:
                self._answered = asked
                self._empty.notify_all()
                again = self._asked > asked
            if not again:
                self._wait(_SEND_EVERY_S)

    def _wait(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _send_all(self) -> None:
        try:
            self._send_again()
            while not self._closed and (found := self._record.read(self.sent.offset, _BATCH_RECORDS)):
                # One call to the server for consecutive metrics, and one for each other record.
                for _, group in itertools.groupby(found, lambda r: "" if r["op"] in METRICS else r["n"]):
                    records = list(group)
                    if self._closed:
                        return
                    self._send(records)
                    # Closed meanwhile: another process may hold the record already, so leave it as it is. The
                    # server counts a record that it gets twice only once.
                    if self._closed:
                        return
                    self.sent.offset, self.sent.closed = records[-1]["end"], False
        finally:
            if not self._closed:
                self._save()

    def _save(self) -> None:
        if self._record.sent() != self.sent:
            self._record.save(self.sent)

    def _send_again(self) -> None:
        """Send records that were refused earlier."""
        if not self._again:
            return
        for offset in list(self.sent.refused):
            records = self._record.read(offset, 1)
            if records and records[0]["op"] in self._again and self._send(records, refused=True):
                del self.sent.refused[offset]
        self._again = ()

    def _send_end(self) -> None:
        """Send what the end of a run has besides its records: what is lost, and the file itself."""
        text = self.sent.losses().text()
        if text != self.sent.told:
            self._write([{"op": "losses", "text": masked(text)}])
            self.sent.told = text
        if not self.sent.closed:
            self._write([{"op": "whole"}])
            self.sent.closed = True
        self._save()

    def _send(self, records: list[Record], refused: bool = False) -> bool:
        """Send records; return whether the server took them. refused: it refused them before."""
        first = records[0]
        if first["op"] == DAMAGED:
            self.sent.damaged += 1
            return False
        if first["op"] == "unkept":
            self.sent.unkept += first["count"]
            return True
        for wait_s in (*_REFUSED_RETRY_S, None):
            try:
                self._write(records)
                return True
            except (Refused, *_RECORD_ERRORS) as error:
                # Subclasses from libraries are trouble with the connection, to be tried again: `requests`
                # raises a ValueError of its own when an answer is not JSON.
                if not isinstance(error, Refused) and type(error).__module__ != "builtins":
                    raise
                if len(records) > 1:  # one bad record makes the server refuse the whole call
                    taken = [self._send([record]) for record in records]
                    return all(taken)
                if wait_s is None or not (isinstance(error, Refused) and error.again):
                    reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
                    _warn("the tracking server refused a record: %s", _short(reason))
                    if not refused:
                        self.sent.refuse(first["n"], _short(reason))
                    return False
            time.sleep(wait_s)
        return False


def _warn(message: str, *values: str) -> None:
    with contextlib.suppress(Exception):  # a user's failing log handler must not stop the sending
        _log.warning(message, *values)


def _short(error: Exception | str) -> str:
    text = masked(" ".join(str(error).split()))
    return text if len(text) < 200 else f"{text[:200]}..."
