"""Sends a run's outbox from a thread of its own: in order, as often as it takes, without the training
noticing."""

import contextlib
import contextvars
import itertools
import logging
import threading
import time
from collections.abc import Callable

from dphybrid.tracking.base import Record
from dphybrid.tracking.outbox import Losses, Outbox
from dphybrid.util.text import masked

_SEND_EVERY_S = 2.0
_HEARTBEAT_EVERY_S = 60.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 15.0
_REFUSED_RETRY_S = (0.1, 0.3, 0.9, 2.7)
"""Waits between the tries of a record whose refusal may be another matter in a moment."""
_AT_ONCE = 200
_WRONG = (KeyError, ValueError, TypeError, AttributeError, FileNotFoundError)
"""Errors of a record itself; the client's libraries have their own, and those are tried again."""
_log = logging.getLogger(__name__)


class Refused(Exception):
    """The server understood and said no. `again`: it may be another matter in a moment, as when two runs
    wrote the same thing at once."""

    def __init__(self, text: str, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


class Sender:
    """Takes records from `outbox` and gives them to `write` until each is acknowledged.

    write: takes records that belong together (metrics, or one of another kind); raises Refused, or any other
    error to be tried again.
    beat: called about once a minute, to show that the process lives.
    """

    def __init__(
        self, outbox: Outbox, write: Callable[[list[Record]], None], beat: Callable[[], None] = lambda: None
    ) -> None:
        self._outbox, self._write, self._beat = outbox, write, beat
        self._wake = threading.Event()
        self._empty = threading.Condition()
        self._closed = False
        self._asked = self._answered = 0
        self.trouble: str = ""
        """What the latest attempt to send failed with, or nothing."""
        self.refused: dict[int, str] = {}
        """Numbers of records that the server did not take, with its reason."""
        # In the caller's context, so that what is logged here stands in the log of the caller's flow run.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=work, args=(self._work,), name="dphybrid-tracking", daemon=True
        )
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until what the outbox holds now has arrived, at most `timeout_s` seconds; return whether it
        has."""
        with self._empty:
            self._asked += 1
            wanted = self._asked
            self._wake.set()
            return self._empty.wait_for(
                lambda: self._answered >= wanted or self._closed or not self._thread.is_alive(), timeout_s
            ) and (self._answered >= wanted)

    def close(self, timeout_s: float) -> bool:
        """Drain, end the thread and let go of the outbox; return whether everything arrived."""
        arrived = self._end(timeout_s)
        self._outbox.release()
        return arrived

    def deliver(self, wait_s: float) -> tuple[bool, Losses]:
        """Send the rest, the table of details and what is lost, in at most about `wait_s` seconds, and close;
        return whether all that is left has arrived, and what is lost."""
        end = time.monotonic() + wait_s
        if arrived := self.drain(wait_s):
            self._outbox.pack_details()
            if losses := self._outbox.losses():
                self._outbox.append({"op": "losses", "text": masked(losses.text())})
        arrived = self._end(max(0.5, end - time.monotonic()) if arrived else 0.0)
        losses = self._outbox.losses()
        self._outbox.release()
        return arrived, losses

    def _end(self, timeout_s: float) -> bool:
        arrived = self.drain(timeout_s)
        self._closed = True
        self._wake.set()
        self._thread.join(1.0 if arrived else 0.1)  # a thread that waits for a dead server is left to itself
        return arrived

    def _work(self) -> None:
        retry_s, beaten = _FIRST_RETRY_S, 0.0
        while not self._closed:
            asked = self._asked  # before the look: who asks meanwhile is answered by the next one
            try:
                if not self._outbox.hold():
                    raise BlockingIOError("another process is sending this run's records")
                if time.monotonic() - beaten > _HEARTBEAT_EVERY_S:
                    self._beat()
                    beaten = time.monotonic()
                self._send_all()
            except Exception as error:  # noqa: BLE001 - whatever the server or its client raises: said once, tried again
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
        while not self._closed and (found := self._outbox.pending(_AT_ONCE)):
            # Metrics that follow each other are one call to the server, anything else is a call of its own.
            for _, group in itertools.groupby(found, lambda r: "" if r["op"] == "metrics" else r["n"]):
                records = list(group)
                if self._closed:
                    return
                self._send(records)
                # given up meanwhile: whoever sends next begins here, and what comes twice counts once
                if self._closed:
                    return
                self._outbox.remove(records)

    def _send(self, records: list[Record]) -> None:
        for wait_s in (*_REFUSED_RETRY_S, None):
            try:
                self._write(records)
                return
            except (Refused, *_WRONG) as error:
                # Libraries have their own: in `requests`, an answer that is no JSON is a ValueError.
                if not isinstance(error, Refused) and type(error).__module__ != "builtins":
                    raise
                if len(records) > 1:  # one of them spoils the others
                    for record in records:
                        self._send([record])
                    return
                if wait_s is None or not (isinstance(error, Refused) and error.again):
                    reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
                    _warn("the tracking server refused a record: %s", _short(reason))
                    self.refused[records[0]["n"]] = _short(reason)
                    self._outbox.refuse(records[0], reason)
                    return
            time.sleep(wait_s)


def _warn(message: str, *values: str) -> None:
    with contextlib.suppress(Exception):  # somebody's log handler must not end the sending
        _log.warning(message, *values)


def _short(error: Exception | str) -> str:
    text = masked(" ".join(str(error).split()))
    return text if len(text) < 200 else f"{text[:200]}..."
