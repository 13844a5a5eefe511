"""The progress of training: a bar in a terminal or a notebook, a line an epoch elsewhere."""

import html
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_PASSING_S = 30.0
"""Without a bar, a line of an epoch's metrics comes this long after the line before it."""
NOTEBOOK_S = 0.3
"""Between two drawings of a notebook's bar."""
QUIET_S = 5.0
"""Without a terminal, shorter preparation prints no progress."""


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


class _TerminalBar:
    """A bar at the bottom of a terminal."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Progress(*columns, console=Console(soft_wrap=True), transient=True)
        self._task: TaskID | None = None
        self.start, self.stop = self._bar.start, self._bar.stop

    def epoch(self, title: str, num_batches: int, done: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(title, total=num_batches, completed=done, note="")

    def advance(self, note: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, advance=1, note=note)

    def line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


class _NotebookBar:
    """A bar in the output of a notebook's cell, drawn a few times a second; gone when the training ends."""

    def __init__(self) -> None:
        self._ipython = importlib.import_module("IPython.display")
        self._shown: Any = None
        self._title, self._total, self._done, self._drawn = "", 1, 0, 0.0

    def start(self) -> None:
        self._shown = self._ipython.display(self._ipython.HTML(""), display_id=True)

    def stop(self) -> None:
        self._shown.update(self._ipython.HTML(""))

    def epoch(self, title: str, num_batches: int, done: int) -> None:
        self._title, self._total, self._done = title, num_batches, done
        self._draw("")

    def advance(self, note: str) -> None:
        self._done += 1
        if time.monotonic() - self._drawn > NOTEBOOK_S:
            self._draw(note)

    def line(self, text: str) -> None:
        print(text, flush=True)

    def _draw(self, note: str) -> None:
        self._drawn = time.monotonic()
        words = html.escape(f"{self._title}: {self._done:,} of {self._total:,}  {note}")
        bar = f'<progress value="{self._done}" max="{self._total}" style="width:20em"></progress>'
        self._shown.update(self._ipython.HTML(f"{bar} {words}"))


def _in_notebook() -> bool:
    """Tell whether a notebook's kernel runs this program."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class Display:
    """Prints lines; in a terminal or a notebook it also keeps a bar for the epoch."""

    def __init__(self) -> None:
        self._bar: _TerminalBar | _NotebookBar | None = None
        self._told = time.monotonic()
        if sys.stdout.isatty():
            self._bar = _TerminalBar()
        elif _in_notebook() and not isinstance(sys.stdout, StringIO):  # else somebody wants no output
            self._bar = _NotebookBar()

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
        if self._bar is not None:
            self._bar.epoch(f"epoch {epoch + 1}/{epochs}", num_batches, done)

    def advance(self, note: str = "") -> None:
        """Move the bar by one batch."""
        if self._bar is not None:
            self._bar.advance(note)

    def passing(self, text: str) -> None:
        """Print a line of the metrics within an epoch: where there is no bar, and not often."""
        if self._bar is None and time.monotonic() - self._told > _PASSING_S:
            self.line(text)

    def line(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self._told = time.monotonic()
        if self._bar is not None:
            self._bar.line(text)
        else:
            print(text, flush=True)
