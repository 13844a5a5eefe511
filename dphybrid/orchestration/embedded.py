"""Run a flow in this process, with its output on the terminal; on a temporary Prefect server if no server is
set."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_UI_URL,
    get_current_settings,
    temporary_settings,
)

from dphybrid.config.settings import load_settings
from dphybrid.orchestration.supervised import without_tracebacks_of_user_errors
from dphybrid.orchestration.temporary_server import TemporaryServer
from dphybrid.tracking.opening import import_mlflow
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.stop import Interrupted


@contextmanager
def in_this_process() -> Iterator[Callable[[], None]]:
    """Let flows that are called in the block run quietly and quickly; yield a function that stops the
    temporary server."""
    without_tracebacks_of_user_errors()
    server = start_server()
    # These imports take seconds, so do them while the server starts.
    with kept_from_gc():
        import dphybrid.orchestration.steps  # noqa: F401
    import_mlflow(load_settings().mlflow_uri)
    # No heartbeats: only a permanent server's automation reads them, and sending them costs about a second.
    updates: dict[object, object] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    if server:
        server.wait(get_current_settings().server.ephemeral.startup_timeout_seconds)
        updates |= {
            PREFECT_API_URL: server.api_url,
            PREFECT_UI_URL: "",  # it serves no pages
            # A permanent server comes back after an outage, this one does not: give up soon.
            PREFECT_CLIENT_MAX_RETRIES: 2,
        }
    with temporary_settings(updates), _only_warnings() if server else nullcontext():
        try:
            yield server.stop if server else lambda: None
        except Exception as error:
            if interruption := _interruption_behind(error):
                # A permanent server did not answer: the failure to report the interruption has hidden it.
                raise interruption from None
            raise


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Let Prefect print only warnings and errors, unless its log level is set. The flow prints each step
    itself, and the links that Prefect prints lead nowhere without a permanent server."""
    shown = [seen for seen in logging.getLogger().handlers if isinstance(seen, PrefectConsoleHandler)]
    if "level" in get_current_settings().logging.model_fields_set:
        shown = []
    for handler in shown:
        handler.addFilter(_adds_to_the_command)
    try:
        yield
    finally:
        for handler in shown:
            handler.removeFilter(_adds_to_the_command)


def _adds_to_the_command(record: logging.LogRecord) -> bool:
    ended = record.getMessage().startswith("Finished in state")  # the command's own last line says why
    return record.levelno >= logging.WARNING and not ended


def start_server() -> TemporaryServer | None:
    """Start a temporary server. Returns None if another server is set, or if Prefect's settings forbid
    temporary servers."""
    settings = get_current_settings()
    if settings.api.url or not settings.server.ephemeral.enabled:
        return None
    return TemporaryServer(settings.to_environment_variables(exclude_unset=True))


def _interruption_behind(error: BaseException) -> Interrupted | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Interrupted):
        seen = seen.__cause__ or seen.__context__
    return seen
