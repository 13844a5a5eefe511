"""Stopping with a checkpoint: a request waits until the current step is done, then the run writes a
checkpoint and raises `Interrupted`. `watching` is a thread that looks for reasons to stop."""

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
    """A run stopped on request; what it had reached is in its newest checkpoint.

    reason: who asked, for people. signal_number: the signal that asked, or None. requeue: it stopped to give
    way, and wants to go on later. run: name of the run to go on with; None when it stopped before it had one.
    """

    def __init__(self, reason: str, signal_number: int | None = None, requeue: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number
        self.requeue = requeue
        self.run: str | None = None


class StopRequest:
    """A flag that asks one run to stop. It is made before the run and passed to everything that may set it or
    obey it.

    The loop looks at `pending` between steps; what comes before and after the loop calls `obey` where it can
    end.
    """

    def __init__(self) -> None:
        self._asked: Interrupted | None = None  # replaced as a whole, so without a lock

    @property
    def pending(self) -> bool:
        """Whether the run was asked to stop."""
        return self._asked is not None

    @property
    def reason(self) -> str:
        """Who asked, for people; "" while nobody has."""
        return self._asked.reason if self._asked else ""

    def ask(self, reason: str, signal_number: int | None = None, requeue: bool = False) -> None:
        """Ask the run to stop. May be called from any thread. requeue: to go on later.

        The first reason stays, but a signal ends also what was only to give way.
        """
        before = self._asked
        if before is None or (before.signal_number is None and signal_number is not None):
            self._asked = Interrupted(reason, signal_number, requeue)

    def interruption(self, reached: str = "") -> Interrupted:
        """Return the exception for the request at hand. reached: how far the run came, such as "after step
        7"."""
        asked = self._asked
        assert asked is not None
        words = f"stopped by {asked.reason}{' ' + reached if reached else ''}"
        return Interrupted(words, asked.signal_number, asked.requeue)

    def obey(self, reached: str = "") -> None:
        """Raise Interrupted when somebody has asked."""
        if self._asked is not None:
            raise self.interruption(reached)


@contextmanager
def stop_signals(stop: StopRequest, at_once: bool = False) -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into a stop request while the block runs; a second one interrupts at
    once.

    at_once: the first one raises Interrupted, too, for blocks that lose nothing by it. Outside the main
    thread Python allows no signal handlers; there nothing is changed.
    """
    # Such as a run of an application, or of a search with threads.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signalled = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal signalled
        stop.ask(_NAMES[signal.Signals(number)], number)
        if at_once:
            raise stop.interruption()
        if signalled:
            raise KeyboardInterrupt
        signalled = True

    # What the caller ignores (SIGHUP under nohup) stays ignored.
    before = {n: signal.signal(n, handle) for n in _NAMES if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watching(look: Callable[[], bool], every_s: float, name: str, end_s: float = 10.0) -> Iterator[None]:
    """While the block runs, call `look` every `every_s` seconds in a thread of that name, until it returns
    True: nothing is left to watch.

    A failed look is reported once, with its traceback, and tried again.
    The block's end waits up to `end_s` seconds for a look that is under way.
    """
    done = threading.Event()

    def work() -> None:
        told = False
        while not done.wait(every_s):
            try:
                if look():
                    return
            except Exception:  # noqa: BLE001 - a thread that died would watch no longer, and nobody would know
                if not told:
                    print(
                        f"{name} failed, and tries again every {every_s:g} s:\n{traceback.format_exc()}",
                        file=sys.stderr,
                        flush=True,
                    )
                told = True

    # a daemon: a look that hangs on a server must not keep the process from ending
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(end_s)
