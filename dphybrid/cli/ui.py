"""`dphybrid ui`: MLflow's pages on a run, from the server in force or from one started here for the embedded
store."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dphybrid.util.errors import UserError
from dphybrid.util.masking import masked

FIRST_PORT, LAST_PORT = 5000, 5049
START_S = 120.0
"""How long MLflow's server may take to answer; on a cold disk its imports take long."""
END_S = 10.0
"""How long it may take to end before it is killed."""


def free_port(wanted: int | None) -> int:
    """Return the port to listen on: `wanted`, or the first free one of 5000 to 5049. Raises UserError when it
    is taken."""
    for port in [wanted] if wanted is not None else range(FIRST_PORT, LAST_PORT + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                if wanted is not None:
                    raise UserError(
                        f"--port {port}: cannot be listened on ({error}); name another, or none for the "
                        f"first free one from {FIRST_PORT} on"
                    ) from error
                continue
            return port
    raise UserError(f"ports {FIRST_PORT} to {LAST_PORT} are taken; name a free one with --port")


@contextmanager
def serving(uri: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run MLflow's server on a database while the block runs, for this machine alone. Raises UserError when
    it does not start, with its last words."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    # Without its runner of jobs, eight processes that pages of runs do not need.
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with tempfile.TemporaryFile() as words:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the server.
        server = subprocess.Popen(
            command, stdout=words, stderr=subprocess.STDOUT, env=quiet | os.environ, start_new_session=True
        )
        try:
            if (wrong := _start(server, port)) is not None:
                words.seek(0)
                said = masked(words.read().decode(errors="replace")[-500:].strip())
                raise UserError(f"mlflow server on port {port}: {wrong}; it said: {said or 'nothing'}")
            yield server
        finally:
            for by_force in (False, True):
                _end(server, by_force)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(END_S)


def _end(server: "subprocess.Popen[bytes]", by_force: bool) -> None:
    """Have the server and its workers end."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL if by_force else signal.SIGTERM)


def _start(server: subprocess.Popen[bytes], port: int) -> str | None:
    """Wait for the server's first answer; return what went wrong, or None."""
    begun = time.monotonic()
    while time.monotonic() - begun < START_S:
        if server.poll() is not None:
            return f"ended with exit code {server.returncode}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return None
        except OSError:
            time.sleep(0.2)
    return f"did not answer within {START_S:.0f} s"


def ended(server: subprocess.Popen[bytes]) -> int:
    """Wait until the server has ended; return its exit code. Ctrl-C raises KeyboardInterrupt."""
    while server.poll() is None:  # a plain wait goes on where the signal reaches another thread first
        time.sleep(0.2)
    return server.returncode


def show(address: str, browser: bool) -> None:
    """Print an address, and open it where a browser is wanted and there is one."""
    print(address, flush=True)
    if browser:
        try:
            webbrowser.open(address)
        except webbrowser.Error:
            print("No browser was found here; open the address in one.", file=sys.stderr)
