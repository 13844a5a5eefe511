"""Stopping in good order: a request, kept until the step in hand is done, then a checkpoint, then `Interrupted`."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "a request to end (SIGTERM)",
    signal.SIGHUP: "the end of its terminal (SIGHUP)",
}


class Interrupted(KeyboardInterrupt):
    """Training stopped on request, after its checkpoint was written.

    reason: who asked, for people. signal_number: the signal that asked, or None. requeue: it stopped to give way, and wants to go on
    later. run: name of the run to go on with.
    """

    def __init__(self, reason: str, signal_number: int | None = None, requeue: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number
        self.requeue = requeue
        self.run: str | None = None


class StopRequest:
    """One process-wide wish to stop; the loop asks `pending` between steps."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        self.signal_number: int | None = None
        self.requeue = False

    @property
    def pending(self) -> bool:
        return self._event.is_set()

    def set(self, reason: str, signal_number: int | None = None, requeue: bool = False) -> None:
        if not self._event.is_set():
            self.reason, self.signal_number, self.requeue = reason, signal_number, requeue
            self._event.set()

    def clear(self) -> None:
        self.reason, self.signal_number, self.requeue = "", None, False
        self._event.clear()


_request = StopRequest()


def request_stop(reason: str, signal_number: int | None = None, requeue: bool = False) -> None:
    """Ask the training of this process to stop after its current step. May be called from any thread. requeue: to go on later."""
    _request.set(reason, signal_number, requeue)


def current_request() -> StopRequest:
    """Return the request that the loop watches."""
    return _request


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM and SIGHUP into a stop request while the block runs; a second one interrupts at once.

    Outside the main thread Python allows no signal handlers, so there only `request_stop` works.
    """
    _request.clear()
    if threading.current_thread() is not threading.main_thread():
        yield _request
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        if _request.pending:
            raise KeyboardInterrupt
        request_stop(_NAMES[signal.Signals(number)], number)

    # What the caller ignores (SIGHUP under nohup) stays ignored.
    before = {number: signal.signal(number, handle) for number in _NAMES if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield _request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
