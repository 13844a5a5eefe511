"""MLflow's pages for one user of this machine: a server at 127.0.0.1 that asks for a token.

`serving` starts it as a process of its own, `python -m dphybrid.tracking.ui_server`, which ends with the
process that started it, however that ends.
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
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dphybrid.util.errors import UserError
from dphybrid.util.text import masked

_HOST = "127.0.0.1"
_START_S = 120.0
"""How long MLflow's server may take to answer; on a cold disk its imports take long."""
_END_S = 10.0
"""How long it may take to end before it is killed."""
_REFUSED = "Open the address that `dphybrid ui` printed: it carries a token.\n"


@contextmanager
def serving(uri: str, port: int) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Run MLflow's server on a database while the block runs; yield its process and the token that its pages
    want. Raises UserError when it does not start, with its last words."""
    token = secrets.token_urlsafe(24)
    # Without its runner of jobs, eight processes that pages of runs do not need.
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with tempfile.TemporaryFile() as words:
        server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,  # its end tells the server that this process has ended
            stdout=words,
            stderr=subprocess.STDOUT,
            env=quiet | os.environ,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the server
        )
        try:
            assert server.stdin is not None
            server.stdin.write(json.dumps([uri, port, token]).encode() + b"\n")
            server.stdin.flush()
            if (wrong := _wait(server, port, token)) is not None:
                words.seek(0)
                said = masked(words.read().decode(errors="replace")[-500:].strip())
                raise UserError(f"MLflow's server on port {port}: {wrong}; it said: {said or 'nothing'}")
            yield server, token
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(_END_S)


def _wait(server: "subprocess.Popen[bytes]", port: int, token: str) -> str | None:
    """Wait for the server's first answer; return what went wrong, or None."""
    begun = time.monotonic()
    wanted = urllib.request.Request(
        f"http://{_HOST}:{port}/health", headers={"Authorization": f"Bearer {token}"}
    )
    while time.monotonic() - begun < _START_S:
        if server.poll() is not None:
            return f"ended with exit code {server.returncode}"
        try:
            with urllib.request.urlopen(wanted, timeout=5):  # noqa: S310 - its own server
                return None
        except OSError:
            time.sleep(0.2)
    return f"did not answer within {_START_S:.0f} s"


class _TokenOnly:
    """Lets requests through to an ASGI app that carry the token: in the address, which sets a cookie and
    leads to the same page without it; as that cookie; or as a bearer (MLFLOW_TRACKING_TOKEN)."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        # Browsers send cookies to all ports of a host.
        self._name, self._cookie = f"dphybrid-{port}", secrets.token_urlsafe(24)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(request := HTTPConnection(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            answer: Response = PlainTextResponse(_REFUSED, 403)
            if _equal(request.query_params.get("token", ""), self._token):
                answer = RedirectResponse(scope["path"], 303)
                answer.set_cookie(self._name, self._cookie, httponly=True, samesite="strict")
            answer.headers.update({"cache-control": "no-store", "referrer-policy": "no-referrer"})
            await answer(scope, receive, send)

    def _may_pass(self, request: HTTPConnection) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        cookie = request.cookies.get(self._name, "")
        return _equal(cookie, self._cookie) or _equal(bearer, self._token)


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())  # as long for a good guess as for a bad one


def main() -> None:
    """Serve until the process that started this one ends: standard input has database, port and token."""
    uri, port, token = json.loads(sys.stdin.buffer.readline())

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        # Not sys.exit: that would end this thread alone.
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
