"""Progress output: a bar in a terminal, otherwise one line per epoch."""

import sys
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dphybrid.util.text import printable

_METRICS_EVERY_S = 30.0
"""Without a bar, metrics within an epoch are printed at most once in this time."""
_PREPARATION_EVERY_S = 5.0
"""Progress of a preparation is printed at most once in this time."""


def preparation_progress() -> Callable[[str, int, int], None]:
    """Return a callback `(what, done, total)` that prints the progress of long work every few seconds."""
    printed = time.monotonic()

    def print_line(what: str, done: int, total: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > _PREPARATION_EVERY_S:
            printed = time.monotonic()
            print(f"  {what}: {done:,} of {total:,}", flush=True)

    return print_line


class Display:
    """Prints lines and, in a terminal, keeps a bar for the epoch below them."""

    def __init__(self) -> None:
        self._printed = time.monotonic()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        note = TextColumn("{task.fields[note]}")
        # soft_wrap: rich would break long lines itself, and a copied path would have a newline in it.
        bar = Progress(*columns, note, console=Console(soft_wrap=True), transient=True)
        self._bar = bar if sys.stdout.isatty() else None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def epoch(self, epoch: int, epochs: int, num_batches: int, done: int) -> None:
        """Start the bar of an epoch (counted from 0); `done` of its batches are already trained."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            title = f"epoch {epoch + 1}/{epochs}"
            self._task = self._bar.add_task(title, total=num_batches, completed=done, note="")

    def advance(self, note: str = "") -> None:
        """Move the bar by one batch."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, note=note)

    def metrics_line(self, text: str) -> None:
        """Print a line of metrics within an epoch: only where there is no bar, and not often."""
        if self._bar is None and time.monotonic() - self._printed > _METRICS_EVERY_S:
            self.line(text)

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._printed = time.monotonic()
        if self._bar is not None:
            # markup off: rich would take `[name]` in a user's text for a style and drop it.
            self._bar.console.print(printable(text), markup=False, highlight=False)
        else:
            print(text, flush=True)
