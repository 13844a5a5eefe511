"""Run a flow in this process, with its output on the terminal; on Prefect's temporary server if no server is
set."""

import atexit
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
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

_OF_SERVER = {
    "PREFECT__SERVER_EPHEMERAL": "1",  # leaves out the pages, and the services for deployments
    # Block types are for the pages of a permanent server, which registers them when it starts.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}


@contextmanager
def in_this_process() -> Iterator[None]:
    """Let flows that are called in the block run quietly and quickly. Raises UserError if the temporary
    server does not start."""
    without_tracebacks_of_user_errors()
    settings = get_current_settings()
    with ExitStack() as held:
        if settings.api.url or not settings.server.ephemeral.enabled:
            _import_steps()
        else:
            held.enter_context(_temporary_server())
            held.enter_context(_only_warnings())
        # No heartbeats: only a permanent server's automation reads them, and they cost about a second.
        held.enter_context(temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))
        try:
            yield
        except Exception as error:
            if interruption := _interruption_behind(error):
                # A server did not answer: the failure to report the interruption has hidden it.
                raise interruption from None
            raise


def _import_steps() -> None:
    with kept_from_gc():
        import dphybrid.orchestration.steps  # noqa: F401
    import_mlflow(load_settings().mlflow_uri)


@contextmanager
def _temporary_server() -> Iterator[None]:
    """Serve the block's flows by Prefect's temporary server, which starts while this process imports what
    takes seconds."""
    server, address = start_server()
    _import_steps()
    wait_for(server, address)
    # A permanent server comes back after an outage, this one does not: give up soon. It serves no pages.
    own = {PREFECT_API_URL: address, PREFECT_UI_URL: "", PREFECT_CLIENT_MAX_RETRIES: 2}
    with temporary_settings(own):
        yield  # the server ends with this process, once the last events were sent


def start_server() -> "tuple[subprocess.Popen[bytes], str]":
    """Start Prefect's temporary server; return its process, and its address once it answers (`wait_for`).

    Prefect's own starter would import the server into this process, too, which takes two seconds.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = ["-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level", "error"]
    argv = [sys.executable, "-P", *argv, "--host", "127.0.0.1", "--port", str(port)]
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    # Ctrl-C and a closed terminal signal every process of a command. They should end the training, which
    # still needs its server; a child inherits the signal mask of the thread that starts it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        process = subprocess.Popen(
            argv, env={**os.environ, **settings, **_OF_SERVER}, preexec_fn=_end_with_parent
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    atexit.register(stop_server, process)
    return process, f"http://127.0.0.1:{port}/api"


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent dies, however that ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def wait_for(server: "subprocess.Popen[bytes]", address: str) -> None:
    """Wait until the server answers. Raises UserError if it does not; the server itself prints why."""
    deadline = time.monotonic() + get_current_settings().server.ephemeral.startup_timeout_seconds
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{address}/health", trust_env=False).is_success:
                return
        time.sleep(0.1)
    stop_server(server)
    raise UserError(
        "Prefect's temporary server does not start; run `dphybrid doctor` to find the cause, or `dphybrid "
        "train`, which needs no server"
    )


def stop_server(server: "subprocess.Popen[bytes]") -> None:
    """End the server, which first writes the events that it has received to the database."""
    server.terminate()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


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


def _interruption_behind(error: BaseException) -> Interrupted | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Interrupted):
        seen = seen.__cause__ or seen.__context__
    return seen
