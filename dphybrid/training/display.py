"""What a person sees while training: a progress bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUIET_S = 5.0
"""Preparation shorter than this is not told where there is no terminal."""


@contextmanager
def preparation_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (what, done, total) for long work: a bar in a terminal, now and then a line
    elsewhere."""
    if not sys.stdout.isatty():
        told = time.monotonic()

        def tell(what: str, done: int, total: int) -> None:
            nonlocal told
            if time.monotonic() - told > QUIET_S:
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
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=Console(soft_wrap=True), transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def epoch(self, epoch: int, epochs: int, num_batches: int, done: int) -> None:
        """Start the bar of an epoch (counted from 0) of which `done` batches are behind us."""
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(
            f"epoch {epoch + 1}/{epochs}", total=num_batches, completed=done, note=""
        )

    def advance(self, note: str = "") -> None:
        """Move the bar by one batch."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, note=note)

    def line(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)
