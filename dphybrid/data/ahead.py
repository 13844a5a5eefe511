"""Work done by threads, a few items ahead of whoever uses it, in the order in which it was asked for."""

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
    """Yield `function(item)` of each item in order, computed by threads up to two items a thread ahead. Errors are raised in their place."""
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[T]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def ahead(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Yield what `items` yields, made by a thread of its own up to `depth` items ahead. Its errors are raised in their place."""
    with ThreadPoolExecutor(1) as thread:
        pending: deque[Future[T | object]] = deque(thread.submit(next, items, _END) for _ in range(depth))
        try:
            while (item := pending.popleft().result()) is not _END:
                pending.append(thread.submit(next, items, _END))
                yield item  # type: ignore[misc]
        finally:
            for future in pending:
                future.cancel()
