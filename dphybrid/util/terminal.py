"""Standard output and standard error of a command: a terminal that closes is a request to stop, and a full
disk or a closed pipe is reported under the stream's name."""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from dphybrid.util.errors import UserError
from dphybrid.util.text import printable

_NAMES = {1: "standard output", 2: "standard error"}


class _Descriptor(io.FileIO):
    """Writes to descriptor 1 or 2. After an error, what is still buffered goes to /dev/null: Python would try
    again at its end and print a traceback."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _discard(self.fileno())
            if error.errno == errno.EIO:
                # Its window was closed. The kernel sends SIGHUP only to the terminal's foreground processes.
                signal.raise_signal(signal.SIGHUP)
                return len(data)
            error.filename = _NAMES[self.fileno()]
            raise


@contextmanager
def guarded_output() -> Iterator[None]:
    """During the block, write standard output and error as this module says, and flush them at its end.

    Raises UserError when standard output is closed, and OSError, under the stream's name, when it cannot be
    written.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout is None:
        raise UserError("standard output is closed; redirect it to a file, or to /dev/null")
    sys.stdout, sys.stderr = guarded = _guarded(sys.stdout), _guarded(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in guarded:
            stream.flush()


def _guarded(stream: TextIO) -> TextIO:
    """Return a stream as `_Descriptor` writes it; one of another kind, in a notebook say, is returned as it
    is."""
    if stream not in (sys.__stdout__, sys.__stderr__) or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(stream.fileno())),
        encoding=stream.encoding,
        # print would raise for a character, of a column's name say, that the locale does not have.
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
    )


def tell(text: str) -> None:
    """Print a line on standard error, if that can still be written."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        _discard(2)


def _discard(number: int) -> None:
    """Let what is written to a descriptor go to /dev/null."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), number)
