"""Run a flow in this process, with its output on the terminal; on Prefect's temporary server if no server is
set."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
from dphybrid.tracking.opening import import_mlflow
from dphybrid.util.errors import UserError
from dphybrid.util.importing import kept_from_gc
from dphybrid.util.stop import Interrupted

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer


@contextmanager
def in_this_process() -> Iterator[None]:
    """Let flows that are called in the block run quietly and quickly."""
    without_tracebacks_of_user_errors()
    settings = get_current_settings()
    # No heartbeats: only a permanent server's automation reads them, and they cost about a second.
    own: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    if not settings.api.url and settings.server.ephemeral.enabled:
        if "level" not in settings.logging.model_fields_set:
            _show_only_warnings()
        # A permanent server comes back after an outage, this one does not: give up soon. It serves no pages.
        own |= {PREFECT_API_URL: start_server().api_url, PREFECT_UI_URL: "", PREFECT_CLIENT_MAX_RETRIES: 2}
    with kept_from_gc():
        import dphybrid.orchestration.steps  # noqa: F401
    import_mlflow(load_settings().mlflow_uri)
    with temporary_settings(own):
        try:
            yield
        except Exception as error:
            if interruption := _interruption_behind(error):
                # A server did not answer: the failure to report the interruption has hidden it.
                raise interruption from None
            raise


def start_server() -> "SubprocessASGIServer":
    """Start Prefect's temporary server, which ends with this process; return it once it answers. Raises
    UserError if it does not; the server itself prints why."""
    from prefect.server.api.server import SubprocessASGIServer  # which takes two seconds

    server = SubprocessASGIServer()
    # Ctrl-C and a closed terminal signal every process of a command. They should end the training, which
    # still needs its server; a child inherits the signal mask of the thread that starts it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        server.start()
    except RuntimeError as error:
        raise UserError(
            "Prefect's temporary server does not start; run `dphybrid doctor` to find the cause, or "
            "`dphybrid train`, which needs no server"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return server


def _show_only_warnings() -> None:
    """Let Prefect print only warnings and errors from now on. The flow prints each step itself, and the links
    that Prefect prints lead nowhere without a permanent server."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(_adds_to_the_command)


def _adds_to_the_command(record: logging.LogRecord) -> bool:
    ended = record.getMessage().startswith("Finished in state")  # the command's own last line says why
    return record.levelno >= logging.WARNING and not ended


def _interruption_behind(error: BaseException) -> Interrupted | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Interrupted):
        seen = seen.__cause__ or seen.__context__
    return seen
