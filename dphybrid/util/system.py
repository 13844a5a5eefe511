"""What not every system has: asked here, and said to people where nothing stands for it.

Linux and macOS have it all but what is in /proc. On Windows one trains on the CPU; what other users or
services share (leases, workers, ranks) is refused by `need_posix`.
"""

import os

from dphybrid.util.errors import UserError

POSIX = hasattr(os, "getuid")
"""Linux or macOS: files have owners, open ones can be renamed and removed, and a process can fork."""

NOT_INHERITED = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_BINARY", 0)
"""Flags of `os.open`: bytes as they are, and for this process alone."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | NOT_INHERITED
"""And besides: no links are followed, and nothing is waited for."""


def need_posix(what: str, instead: str = "") -> None:
    """Raise UserError on Windows. what: starts the message. instead: what else one can do there."""
    if not POSIX:
        raise UserError(f"{what}: not on Windows; use WSL 2{instead and f', or {instead}'}")


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
