"""A temporary Prefect server: a child process that serves the flows of its parent and ends with it.

It serves the same API and database as Prefect's own one (`prefect.server.api.server.SubprocessASGIServer`).
Importing Prefect's costs the flow's process two CPU seconds before the server even starts; this one starts in
parallel with the flow's imports.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException

from dphybrid.util.errors import UserError
from dphybrid.util.importing import kept_from_gc

LEFT_OUT = {
    "PREFECT__SERVER_EPHEMERAL": "1",  # leaves out the pages, and the services for deployments
    # Block types are for the pages of a permanent server, which registers them when it starts. With the last
    # setting on, this server would note in Prefect's folder that they are registered, and a permanent one
    # would skip them.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}


class TemporaryServer:
    """A server on a free port of this machine. The constructor starts it and does not wait for it.

    settings: environment variables for the server, besides those of this process.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.api_url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            # Ctrl-C (SIGINT), a closed terminal (SIGHUP), `timeout` or systemd (SIGTERM) signal every process
            # of a command. They should end the training, which still needs its server. So block them: a child
            # inherits the signal mask of the thread that starts it.
            blocked = {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
            before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(listening.fileno())],
                    pass_fds=[listening.fileno()],
                    # Closed by `stop`, or by the kernel when this process dies: that ends the server.
                    stdin=subprocess.PIPE,
                    env={**os.environ, **settings, **LEFT_OUT},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        atexit.register(self.stop)

    def wait(self, timeout_s: float) -> None:
        """Wait until the server answers. Raises UserError if it does not; the server itself prints why."""
        address = self.api_url.removeprefix("http://").removesuffix("/api")
        try:
            # One request without retries: the socket listens already, and the kernel keeps the request until
            # the server can answer.
            with closing(HTTPConnection(address, timeout=timeout_s)) as connection:
                connection.request("GET", "/api/health")
                connection.getresponse()
        except (OSError, HTTPException) as error:
            self.stop()
            raise UserError(
                f"Prefect's temporary server does not start ({error}); run `dphybrid doctor` to find the "
                "cause, or `dphybrid train`, which needs no server"
            ) from error

    def stop(self) -> None:
        """End the server; it first writes the events that it has received to the database."""
        atexit.unregister(self.stop)
        try:
            self._process.communicate(timeout=5)  # closes its standard input
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(listening: socket.socket) -> None:
    """Serve until the other end of standard input is closed, as it is when the starting process ends."""
    server = None

    def end_with_the_starter() -> None:
        sys.stdin.buffer.read()
        if server is None or not server.started:
            os._exit(0)  # It has received nothing that would have to be written.
        server.should_exit = True

    threading.Thread(target=end_with_the_starter, daemon=True).start()
    with kept_from_gc():
        import uvicorn
        from prefect.server.api.server import create_app

        server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error", lifespan="on"))
    server.run(sockets=[listening])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
