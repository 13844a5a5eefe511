"""Calls that may never return, such as those of a driver that hangs."""

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")
NVML_LIMIT_S = 20.0
"""How long the GPUs' driver may take for a reading; one that has hung never answers."""


class Limited(Generic[_T]):
    """A function that is called in a thread of its own, so that signals and other work go on, and that has
    `limit_s` seconds to answer. While one call hangs, no other one is begun."""

    def __init__(self, work: Callable[[], _T], limit_s: float) -> None:
        self._work, self._limit_s = work, limit_s
        self._hangs: threading.Thread | None = None

    def __call__(self) -> _T:
        """Return the answer, or raise what the function raises. Raises TimeoutError when there is none in
        time, at once while an earlier call hangs."""
        if self._hangs is not None and self._hangs.is_alive():
            raise TimeoutError
        done: list[Callable[[], _T]] = []

        def call() -> None:
            try:
                answer = self._work()
            except Exception as error:  # noqa: BLE001 - raised in the caller's thread
                failed = error

                def raising() -> _T:
                    raise failed

                done.append(raising)
            else:
                done.append(lambda: answer)

        # A daemon: a call that hangs must not keep the process from ending.
        thread = threading.Thread(target=contextvars.copy_context().run, args=(call,), daemon=True)
        thread.start()
        thread.join(self._limit_s)
        if not done:
            self._hangs = thread
            raise TimeoutError
        return done[0]()
