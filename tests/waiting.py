"""Wait for other processes, longer on a busy machine."""

import os
import time
from collections.abc import Callable
from typing import Any


def patience(seconds: float) -> float:
    """Return how long to wait for something that takes `seconds` on an idle machine: twice that or more."""
    return seconds * max(2.0, 1.5 * os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 90, every_s: float = 0.1) -> Any:
    """Return the value of `condition()` once it is true. Raises TimeoutError; `what`: its message."""
    start = time.monotonic()
    while not (found := condition()):
        if time.monotonic() - start > patience(timeout_s):
            raise TimeoutError(f"{what} within {time.monotonic() - start:.0f} s")
        time.sleep(every_s)
    return found
