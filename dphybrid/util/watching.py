"""Looking after something beside other work: a thread that calls a function every few seconds."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
