"""The progress of training: a bar in a terminal, a line an epoch elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_PASSING_S = 30.0
"""Without a bar, a line of an epoch's metrics comes this long after the line before it."""
_QUIET_S = 5.0
"""Without a terminal, shorter preparation prints no progress."""


@contextmanager
def preparation_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (what, done, total) for long work: a bar in a terminal, now and then a line
    elsewhere."""
    if not sys.stdout.isatty():
        told = time.monotonic()

        def tell(what: str, done: int, total: int) -> None:
            nonlocal told
            if time.monotonic() - told > _QUIET_S:
                told = time.monotonic()
                print(f"  {what}: {done:,} of {total:,}", flush=True)

        yield tell
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), transient=True
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def move(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield move


class Display:
    """Prints lines; in a terminal it also keeps a bar for the epoch below them."""

    def __init__(self) -> None:
        self._told = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=Console(soft_wrap=True), transient=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def epoch(self, epoch: int, epochs: int, num_batches: int, done: int) -> None:
        """Start the bar of an epoch (counted from 0) of which `done` batches are behind us."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            title = f"epoch {epoch + 1}/{epochs}"
            self._task = self._bar.add_task(title, total=num_batches, completed=done, note="")

    def advance(self, note: str = "") -> None:
        """Move the bar by one batch."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, note=note)

    def passing(self, text: str) -> None:
        """Print a line of the metrics within an epoch: where there is no bar, and not often."""
        if self._bar is None and time.monotonic() - self._told > _PASSING_S:
            self.line(text)

    def line(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self._told = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)
