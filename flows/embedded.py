"""Running a flow in this process: with Prefect's temporary server where no other is set, and its lines straight on the terminal."""

import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from dphybrid.errors import UserError


@contextmanager
def in_this_process() -> Iterator[Callable[[], None]]:
    """Make flows that are called in the block run quietly and quickly; yields what ends the temporary server."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_not_told_already)
    stop_server = start_embedded_server()
    # The heartbeat, which only a standing server reads, would cost a second at the end.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield stop_server


def start_embedded_server() -> Callable[[], None]:
    """Start Prefect's temporary server, where one is needed, so that Ctrl-C ends the training and not the server below it.

    A terminal sends Ctrl-C to every process started from it. A process inherits the signals that its starting thread has blocked.
    Returns what ends the server.
    """
    if PREFECT_API_URL.value() or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        return lambda: None
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer()

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        server.start()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(start).result()
    return server.stop


def _not_told_already(record: logging.LogRecord) -> bool:
    """Leave out the tracebacks of what `run_cli` tells in one message."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, UserError | KeyboardInterrupt)
