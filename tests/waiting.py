"""Waiting in tests for what other processes do: long enough for a machine that has more to do than these
tests."""

import os
import time
from collections.abc import Callable
from typing import Any


def patience(seconds: float) -> float:
    """Return how long to wait for something that takes up to `seconds` on an idle machine: twice as long,
    more where cores are scarce."""
    return seconds * max(2.0, 1.5 * os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 90, every_s: float = 0.1) -> Any:
    """Return what `condition` comes to once it is true. Raises TimeoutError, with `what`, after the patience
    for `timeout_s`."""
    start = time.monotonic()
    while not (found := condition()):
        if time.monotonic() - start > patience(timeout_s):
            raise TimeoutError(f"{what} within {time.monotonic() - start:.0f} s")
        time.sleep(every_s)
    return found
