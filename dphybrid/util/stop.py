"""Stopping with a checkpoint: after a request, the run finishes its current step, writes a checkpoint and
raises `Interrupted`. `watching` runs a thread that looks for reasons to stop."""

import contextvars
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "a request to end (SIGTERM)",
    signal.SIGHUP: "the end of its terminal (SIGHUP)",
}


class Interrupted(KeyboardInterrupt):
    """A run stopped on request. Its progress is in its newest checkpoint.

    Args:
        reason: Text that says who asked.
        signal_number: The signal that asked, or None.
        requeue: Whether the run only gave way and wants to continue later.

    Attributes:
        run: Name of the run to continue; None if it stopped before it had one.
    """

    def __init__(self, reason: str, signal_number: int | None = None, requeue: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number
        self.requeue = requeue
        self.run: str | None = None


class StopRequest:
    """A flag that asks one run to stop. It is created before the run and passed to everything that may set or
    obey it.

    The training loop checks `pending` between steps. Code before and after the loop calls `obey` at points
    where it can stop.
    """

    def __init__(self) -> None:
        # Needs no lock: threads and signal handlers only ever replace the whole object.
        self._asked: Interrupted | None = None

    @property
    def pending(self) -> bool:
        """Whether the run was asked to stop."""
        return self._asked is not None

    @property
    def reason(self) -> str:
        """Text that says who asked; "" if nobody did."""
        return self._asked.reason if self._asked else ""

    def ask(self, reason: str, signal_number: int | None = None, requeue: bool = False) -> None:
        """Ask the run to stop. May be called from any thread. requeue: the run is to continue later.

        The first request is kept, except that a signal replaces one without a signal: a run that only gives
        way must end when its process is asked to end.
        """
        before = self._asked
        if before is None or (before.signal_number is None and signal_number is not None):
            self._asked = Interrupted(reason, signal_number, requeue)

    def interruption(self, reached: str = "") -> Interrupted:
        """Return the exception for the pending request. reached: how far the run came, such as "after step
        7"."""
        asked = self._asked
        assert asked is not None
        words = f"stopped by {asked.reason}{' ' + reached if reached else ''}"
        return Interrupted(words, asked.signal_number, asked.requeue)

    def obey(self, reached: str = "") -> None:
        """Raise Interrupted if a stop was requested. reached: as in `interruption`."""
        if self._asked is not None:
            raise self.interruption(reached)


@contextmanager
def stop_signals(stop: StopRequest, at_once: bool = False) -> Iterator[None]:
    """While the block runs, turn SIGINT, SIGTERM and SIGHUP into a stop request. A second SIGINT or SIGTERM
    interrupts at once.

    at_once: the first signal raises Interrupted at once, for blocks that lose no work by it. Does nothing
    outside the main thread, where Python allows no signal handlers.
    """
    # A run may be in another thread of an application, or of a search.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signalled = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal signalled
        if number == signal.SIGHUP:
            for stream in (1, 2):
                try:
                    os.ttyname(stream)
                except OSError as error:
                    if error.errno == errno.EIO:  # not ENOTTY: a file or a pipe stays
                        drop_output(stream)
            if stop.pending:  # the kernel and the shell each say that the terminal has ended
                return
        stop.ask(_NAMES[signal.Signals(number)], number)
        if at_once:
            raise stop.interruption()
        if signalled and number != signal.SIGHUP:
            raise KeyboardInterrupt
        signalled = signalled or number != signal.SIGHUP

    # Signals that the caller ignores (SIGHUP under nohup) stay ignored.
    before = {n: signal.signal(n, handle) for n in _NAMES if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def drop_output(stream: int) -> None:
    """Let a stream (1 or 2) whose reader has gone, such as a closed terminal, go to /dev/null: each print,
    and Python's own flush at the end of the process, would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


@contextmanager
def watching(look: Callable[[], bool], every_s: float, name: str, end_s: float = 10.0) -> Iterator[None]:
    """While the block runs, call `look` every `every_s` seconds in a thread called `name`, until it returns
    True.

    The first exception of `look` is printed with its traceback; it is called again in any case. The end of
    the block waits up to `end_s` seconds for a call that is running.
    """
    done = threading.Event()

    def work() -> None:
        reported = False
        while not done.wait(every_s):
            try:
                if look():
                    return
            except Exception:  # noqa: BLE001 - a dead thread would stop watching without anybody noticing
                if not reported:
                    print(
                        f"{name} failed, and tries again every {every_s:g} s:\n{traceback.format_exc()}",
                        file=sys.stderr,
                        flush=True,
                    )
                reported = True

    # In the caller's context, which holds Prefect's settings. A daemon, because a call that hangs on a server
    # must not keep the process from ending.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(end_s)
