"""Running a flow in this process: with Prefect's temporary server where no other is set, and its lines
straight on the terminal."""

import importlib
import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted
from dphybrid.util.system import POSIX


@contextmanager
def in_this_process() -> Iterator[Callable[[], None]]:
    """Make flows that are called in the block run quietly and quickly; yields what ends the temporary
    server."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_not_told_already)
    stop_server = start_embedded_server()
    # only a standing server reads it, at a second's cost
    updates: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    if stop_server:
        # a standing server comes back, this one does not: what is to be told it is soon given up
        updates[PREFECT_CLIENT_MAX_RETRIES] = 2
    with temporary_settings(updates):
        try:
            yield stop_server or (lambda: None)
        except Exception as error:
            if interruption := _interruption_behind(error):
                # the server ended at the same signal, so the flow could not tell it
                raise interruption from None
            raise


def start_embedded_server() -> Callable[[], None] | None:
    """Start Prefect's temporary server, where one is needed, so that Ctrl-C or closing the terminal ends the
    training and not the server below it.

    A terminal sends these signals to every process started from it. A process inherits the signals that its
    starting thread has blocked. Returns what ends the server, None where another one is set.
    """
    if PREFECT_API_URL.value() or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        return None
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer()

    def start() -> None:
        if POSIX:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        server.start()

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start)
        if load_settings().mlflow_uri != "none":  # what the run needs anyway, while the server starts
            importlib.import_module("dphybrid.tracking.mlflow_tracker")
        started.result()
    return server.stop


def _interruption_behind(error: BaseException) -> Interrupted | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Interrupted):
        seen = seen.__cause__ or seen.__context__
    return seen


def _not_told_already(record: logging.LogRecord) -> bool:
    """Leave out the tracebacks of what `run_cli` tells in one message."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, UserError | KeyboardInterrupt)
