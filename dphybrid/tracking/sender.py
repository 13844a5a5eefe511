"""Sends a run's journal from a thread of its own: in order, as often as it takes, without the training
noticing."""

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable

from dphybrid.tracking.journal import Journal, Mark, Record
from dphybrid.util.masking import masked

SEND_EVERY_S = 2.0
HEARTBEAT_EVERY_S = 60.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 15.0
_REFUSED_RETRY_S = (0.1, 0.3, 0.9, 2.7)
"""Waits between the tries of a record whose refusal may be another matter in a moment."""
_AT_ONCE = 200
_WRONG = (
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
_log = logging.getLogger(__name__)


class Refused(Exception):
    """The server understood and said no. `again`: it may be another matter in a moment, as when two runs
    wrote the same thing at once."""

    def __init__(self, text: str, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


class Sender:
    """Takes records from `journal` and gives them to `write` until each is acknowledged.

    write: takes records that belong together (metrics, or one of another kind); raises Refused, or any other
    error to be tried again.
    beat: called about once a minute, to show that the process lives.
    """

    def __init__(
        self, journal: Journal, write: Callable[[list[Record]], None], beat: Callable[[], None]
    ) -> None:
        self._journal, self._write, self._beat = journal, write, beat
        self._wake = threading.Event()
        self._empty = threading.Condition()
        self._closed = False
        self._asked = self._answered = 0
        self.trouble: str = ""
        """What the latest attempt to send failed with, or nothing."""
        self.refused: dict[int, str] = {}
        """Numbers of records that the server did not take, with its reason."""
        # In the caller's context, so that what is told here stands in the log of the caller's flow run.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=work, args=(self._work,), name="dphybrid-tracking", daemon=True
        )
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until what the journal holds now has arrived, at most `timeout_s` seconds; return whether it
        has."""
        with self._empty:
            self._asked += 1
            wanted = self._asked
            self._wake.set()
            return self._empty.wait_for(
                lambda: self._answered >= wanted or not self._thread.is_alive(), timeout_s
            ) and (self._answered >= wanted)

    def close(self, timeout_s: float) -> bool:
        """Drain, end the thread and let go of the journal; return whether everything arrived."""
        arrived = self.drain(timeout_s)
        self._closed = True
        self._wake.set()
        self._thread.join(1.0 if arrived else 0.1)  # a thread that waits for a dead server is left to itself
        self._journal.release()
        return arrived

    def _work(self) -> None:
        retry_s, beaten = _FIRST_RETRY_S, 0.0
        while not self._closed:
            asked = self._asked
            try:
                if not self._journal.hold():
                    raise BlockingIOError("another process is sending this run's records")
                if time.monotonic() - beaten > HEARTBEAT_EVERY_S:
                    self._beat()
                    beaten = time.monotonic()
                self._send_all()
            except Exception as error:  # noqa: BLE001 - whatever the server or its client raises: told once, tried again
                if not self.trouble:
                    _tell(
                        "the tracking server does not take records (%s); they are kept and sent later",
                        _short(error),
                    )
                self.trouble = _short(error)
                self._wait(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                continue
            if self.trouble:
                _tell("the tracking server takes records again")
            self.trouble, retry_s = "", _FIRST_RETRY_S
            with self._empty:
                self._answered = asked
                self._empty.notify_all()
                again = self._asked > asked
            if not again:
                self._wait(SEND_EVERY_S)

    def _wait(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _send_all(self) -> None:
        while not self._closed and (found := self._journal.pending(_AT_ONCE)):
            for group in _groups(found):
                if self._closed:
                    return
                self._send([record for _, record in group])
                # given up meanwhile: whoever sends next begins here, and what comes twice counts once
                if self._closed:
                    return
                self._journal.acknowledge(group[-1][0])

    def _send(self, records: list[Record]) -> None:
        for wait_s in (*_REFUSED_RETRY_S, None):
            try:
                self._write(records)
                return
            except Refused as refusal:
                if len(records) > 1:  # one of them spoils the others
                    for record in records:
                        self._send([record])
                    return
                if wait_s is None or not refusal.again:
                    self._set_aside(records[0], str(refusal))
                    return
            except _WRONG as error:
                # of the client's libraries: something on the way to the server
                if type(error).__module__ != "builtins":
                    raise
                # With this record, not with the server: it must not hold up those behind it.
                if len(records) == 1:
                    self._set_aside(records[0], f"{type(error).__name__}: {error}")
                    return
                for record in records:
                    self._send([record])
                return
            time.sleep(wait_s)

    def _set_aside(self, record: Record, reason: str) -> None:
        _tell("the tracking server refused a record: %s", _short(reason))
        self.refused[record["n"]] = _short(reason)
        self._journal.refuse(record, reason)


def _tell(message: str, *values: str) -> None:
    with contextlib.suppress(Exception):  # somebody's log handler must not end the sending
        _log.warning(message, *values)


def _groups(found: list[tuple[Mark, Record]]) -> list[list[tuple[Mark, Record]]]:
    """Put neighbouring records of metrics together."""
    groups: list[list[tuple[Mark, Record]]] = []
    for item in found:
        if groups and item[1]["op"] == "metrics" == groups[-1][-1][1]["op"]:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _short(error: Exception | str) -> str:
    text = masked(" ".join(str(error).split()))
    return text if len(text) < 200 else f"{text[:200]}..."
