"""MLflow's pages for one user of this machine: a server at 127.0.0.1 that requires a token.

`serving` starts it as a separate process, `python -m dphybrid.tracking.ui_server`. That process ends when the
one that started it ends, even by a kill.
"""

import hmac
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dphybrid.util.asking import ask
from dphybrid.util.errors import UserError
from dphybrid.util.text import masked

_HOST = "127.0.0.1"
_START_S = 120.0
"""How long MLflow's server may take to answer; on a cold disk its imports take long."""
_END_S = 10.0
"""How long the server may take to end before it is killed."""
_ENTER = """<script>
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
location.replace(location.pathname + location.hash);
</script>"""
"""Opens the same page without the token. MLflow opens its assistant over a page until this key is set."""
_REFUSED = "Open the address that `dphybrid ui` printed: it carries a token.\n"


@contextmanager
def serving(uri: str, port: int) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Run MLflow's server on a database while the block runs; yield its process and the token that its pages
    require. Raises UserError with the end of its output when it does not start."""
    token = secrets.token_urlsafe(24)
    # Job execution would start eight more processes, which the pages of runs do not need.
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,  # the kernel closes it when this process ends, and the server notices
            stdout=output,
            stderr=subprocess.STDOUT,
            env=quiet | os.environ,
            start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends the server
        )
        try:
            assert server.stdin is not None
            # The token goes through stdin, as all users of the machine can read command lines.
            server.stdin.write(json.dumps([uri, port, token]).encode() + b"\n")
            server.stdin.flush()
            if (problem := _wait(server, port, token)) is not None:
                output.seek(0)
                printed = masked(output.read().decode(errors="replace")[-500:].strip())
                raise UserError(
                    f"MLflow's server on port {port}: {problem}; it printed: {printed or 'nothing'}"
                )
            yield server, token
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(_END_S)


def _wait(server: "subprocess.Popen[bytes]", port: int, token: str) -> str | None:
    """Wait for the server's first answer; return what went wrong, or None."""
    started = time.monotonic()
    while time.monotonic() - started < _START_S:
        if server.poll() is not None:
            return f"ended with exit code {server.returncode}"
        if not ask(f"http://{_HOST}:{port}/health", token=token).wrong:
            return None
        time.sleep(0.2)
    return f"did not answer within {_START_S:.0f} s"


class _TokenOnly:
    """Wraps an ASGI app and lets only requests with the token pass.

    The token may be a bearer token (MLFLOW_TRACKING_TOKEN) or part of the address (`?token=`). The latter
    sets a cookie, which lets later requests pass, and is answered with `_ENTER`.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        # The port is in the cookie's name, because browsers send a host's cookies to all of its ports: the
        # cookie of a second server must not replace that of the first.
        self._name, self._cookie = f"dphybrid-{port}", secrets.token_urlsafe(24)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(request := HTTPConnection(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            answer: Response = PlainTextResponse(_REFUSED, 403)
            if _equal(request.query_params.get("token", ""), self._token):
                answer = HTMLResponse(_ENTER)
                answer.set_cookie(self._name, self._cookie, httponly=True, samesite="strict")
            answer.headers.update({"cache-control": "no-store", "referrer-policy": "no-referrer"})
            await answer(scope, receive, send)

    def _may_pass(self, request: HTTPConnection) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        cookie = request.cookies.get(self._name, "")
        return _equal(cookie, self._cookie) or _equal(bearer, self._token)


def _equal(given: str, wanted: str) -> bool:
    # Takes equally long wherever the texts differ, so that timing does not help to guess the token.
    return hmac.compare_digest(given.encode(), wanted.encode())


def main() -> None:
    """Serve until the parent process ends. The first line of standard input has database, port and token."""
    uri, port, token = json.loads(sys.stdin.buffer.readline())

    def end_with_parent() -> None:
        sys.stdin.buffer.read()  # returns when the parent has ended
        # Not sys.exit, which would end only this thread.
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()

    import mlflow.server as served
    import uvicorn

    os.environ[served.BACKEND_STORE_URI_ENV_VAR] = uri
    os.environ[served.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
    os.environ[served.SERVE_ARTIFACTS_ENV_VAR] = "true"
    from mlflow.server.fastapi_app import app

    uvicorn.run(_TokenOnly(app, token, port), host=_HOST, port=port, log_level="warning")


if __name__ == "__main__":
    main()
