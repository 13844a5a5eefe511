"""Prefect's temporary server: a process for the flows of another one, with which it ends.

It serves what Prefect's own does (`prefect.server.api.server.SubprocessASGIServer`), with the same database.
Importing that one costs the flow's process two CPU seconds before the server begins to start; this one starts
beside the flow's own imports.
"""

import atexit
import gc
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

LEFT_OUT = {
    "PREFECT__SERVER_EPHEMERAL": "1",  # its pages, and what looks after deployments
    # The types of blocks are for the pages of a standing server, which registers them when it starts: unless
    # this one noted in their folder that it had been done.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}


class TemporaryServer:
    """A server on a free port of this machine, which begins to start when this is made.

    settings: environment variables for it, besides this process's.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.api_url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            # A terminal sends Ctrl-C, and that it closes, to every process started from it: that ends the
            # training, not the server below it. A process inherits what its starting thread has blocked.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(listening.fileno())],
                    pass_fds=[listening.fileno()],
                    stdin=subprocess.PIPE,  # which ends with this process
                    env={**os.environ, **settings, **LEFT_OUT},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        atexit.register(self.stop)

    def wait(self, timeout_s: float) -> None:
        """Wait until it answers. Raises UserError when it does not; why, it has written itself."""
        place = self.api_url.removeprefix("http://").removesuffix("/api")
        try:
            # its port takes requests from the start, and keeps them until they can be answered
            with closing(HTTPConnection(place, timeout=timeout_s)) as connection:
                connection.request("GET", "/api/health")
                connection.getresponse()
        except (OSError, HTTPException) as error:
            self.stop()
            raise UserError(
                f"Prefect's temporary server does not start ({error}); `dphybrid doctor` looks for the "
                "cause, and `dphybrid train` needs none"
            ) from error

    def stop(self) -> None:
        """End it, which first writes down what it was told."""
        atexit.unregister(self.stop)
        with self._process as process:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()


def serve(listening: socket.socket) -> None:
    """Serve until SIGTERM, or until whoever holds the other end of the standard input is gone."""

    def end_with_the_starter() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_the_starter, daemon=True).start()
    gc.disable()  # while a hundred thousand things are made, and all are kept
    import uvicorn
    from prefect.server.api.server import create_app

    server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error", lifespan="on"))
    gc.freeze()
    gc.enable()
    server.run(sockets=[listening])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
