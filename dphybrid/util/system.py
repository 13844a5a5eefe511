"""What the system offers this process."""

import os

NOT_INHERITED = os.O_CLOEXEC
"""Flag of `os.open`: the handle is for this process alone."""
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | NOT_INHERITED
"""Flags of `os.open`: follow no link, and wait for nothing."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
