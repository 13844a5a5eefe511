"""Run a flow in this process: on a temporary server where none is set, with its output straight on the
terminal."""

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
    """Make flows that are called in the block run quietly and quickly; yields what ends the temporary
    server."""
    without_tracebacks_of_user_errors()
    server = start_server()
    with kept_from_gc():  # what every flow needs, and takes long, while the server starts
        import dphybrid.orchestration.steps  # noqa: F401
    # Here as well, while the server starts: both take seconds.
    import_mlflow(load_settings().mlflow_uri)
    # only a standing server reads it, at a second's cost
    updates: dict[object, object] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    if server:
        server.wait(get_current_settings().server.ephemeral.startup_timeout_seconds)
        updates |= {
            PREFECT_API_URL: server.api_url,
            PREFECT_UI_URL: "",  # it has no pages
            # a standing server comes back, this one does not: what is to be told it is soon given up
            PREFECT_CLIENT_MAX_RETRIES: 2,
        }
    with temporary_settings(updates), _only_warnings() if server else nullcontext():
        try:
            yield server.stop if server else lambda: None
        except Exception as error:
            if interruption := _interruption_behind(error):
                # the server ended at the same signal, so the flow could not tell it
                raise interruption from None
            raise


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Print Prefect's warnings and errors alone, unless its level is set: the flow prints each step itself,
    and the temporary server has no page to look a run up."""
    shown = [seen for seen in logging.getLogger().handlers if isinstance(seen, PrefectConsoleHandler)]
    if "level" in get_current_settings().logging.model_fields_set:
        shown = []
    for handler in shown:
        handler.addFilter(_says_more_than_the_command)
    try:
        yield
    finally:
        for handler in shown:
            handler.removeFilter(_says_more_than_the_command)


def _says_more_than_the_command(record: logging.LogRecord) -> bool:
    ended = record.getMessage().startswith("Finished in state")  # the command ends with the reason
    return record.levelno >= logging.WARNING and not ended


def start_server() -> TemporaryServer | None:
    """Start the temporary server where one is needed and allowed; None too where Prefect has to start its
    own."""
    settings = get_current_settings()
    if settings.api.url or not settings.server.ephemeral.enabled:
        return None
    return TemporaryServer(settings.to_environment_variables(exclude_unset=True))


def _interruption_behind(error: BaseException) -> Interrupted | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Interrupted):
        seen = seen.__cause__ or seen.__context__
    return seen
