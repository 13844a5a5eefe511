"""Standard output and standard error of a command: control characters are escaped, a terminal that closes is
a request to stop, and a full disk or a closed pipe is reported under the stream's name."""

import errno
import io
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from dphybrid.util.errors import UserError
from dphybrid.util.text import folded, printable

_NARROWEST = 40
"""Lines are not folded to fewer columns."""
_NAMES = {1: "standard output", 2: "standard error"}


class _Descriptor(io.FileIO):
    """Writes to descriptor 1 or 2. After an error, what is still buffered goes to /dev/null: Python would try
    again at its end and print a traceback."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        # Stored now: isatty is false once the terminal has closed.
        self._of_terminal = os.isatty(number)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _discard(self.fileno())
            if error.errno == errno.EIO and self._of_terminal:
                # Its window was closed. The kernel sends SIGHUP only to the terminal's foreground processes.
                signal.raise_signal(signal.SIGHUP)
                return len(data)
            error.filename = _NAMES[self.fileno()]
            raise


class _Escaped:
    """A text stream that escapes control characters: a column's name must not move the cursor or change
    colours. In a terminal it also folds lines at blanks. `unescaped` is the stream below, for what draws on a
    terminal."""

    def __init__(self, stream: TextIO, folds: bool = True) -> None:
        self.unescaped, self._folds, self._starts = stream, folds, True

    def write(self, text: str) -> int:
        # print writes a whole line first and then its end.
        shown, folds = printable(text), self._folds and self._starts
        self.unescaped.write(fitted(shown, self.unescaped) if folds else shown)
        self._starts = text.endswith("\n") if text else self._starts
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


def fitted(text: str, stream: TextIO) -> str:
    """Return a text with lines that fit the width of the terminal that the stream is, if it is one."""
    return folded(text, max(_NARROWEST, shutil.get_terminal_size().columns)) if stream.isatty() else text


def unescaped_output() -> TextIO:
    """Return standard output as a stream that escapes nothing, for progress bars and for data."""
    stream: Any = sys.stdout
    return stream.unescaped if isinstance(stream, _Escaped) else stream


def data_output() -> Any:
    """Return standard output as a stream for lines of data: escaped in a terminal, never folded."""
    stream = unescaped_output()
    return _Escaped(stream, folds=False) if stream.isatty() else stream


@contextmanager
def guarded_output() -> Iterator[None]:
    """During the block, write standard output and error as this module says, and flush them at its end.

    Raises UserError when standard output is closed, and OSError, under the stream's name, when it cannot be
    written.
    """
    for number in (0, 2):
        with suppress(OSError):
            os.fstat(number)
            continue
        # Otherwise the next file that is opened would get this number, and what is printed.
        os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    if sys.stdout is None:
        raise UserError("standard output is closed; redirect it to a file, or to /dev/null")
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - lives as long as the process
        before = sys.stdout, sys.stderr
    guarded = [_guarded(stream) for stream in before]
    sys.stdout, sys.stderr = _Escaped(guarded[0]), guarded[1]
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
        print(fitted(printable(text), sys.stderr), file=sys.stderr, flush=True)
    except OSError:
        _discard(2)


def _discard(number: int) -> None:
    """Let what is written to a descriptor go to /dev/null."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), number)
