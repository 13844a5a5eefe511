"""Threads that work a few items ahead of the consumer and return the results in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")
THREADS = min(4, os.cpu_count() or 1)
_END = object()


def mapped(function: Callable[[S], T], items: Iterable[S], threads: int = THREADS) -> Iterator[T]:
    """Yield `function(item)` of each item in order, computed by threads that are two items ahead.

    A thread of its own makes the items. Errors, those of `items` too, are raised in their place.
    """
    # One thread makes the items: two threads must not call next() of a generator at once.
    source, maker, workers = iter(items), ThreadPoolExecutor(1), ThreadPoolExecutor(threads)

    def work(made: Future[S | object]) -> T | object:
        item = made.result()
        return _END if item is _END else function(item)  # type: ignore[arg-type]

    def ask() -> Future[T | object]:
        return workers.submit(work, maker.submit(next, source, _END))

    pending = deque(ask() for _ in range(threads + 2))
    try:
        while (found := pending.popleft().result()) is not _END:
            pending.append(ask())
            yield found  # type: ignore[misc]
    finally:
        maker.shutdown(cancel_futures=True)
        workers.shutdown(cancel_futures=True)
