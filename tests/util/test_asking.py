"""Requests to servers: the token, and a proxy for others."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dphybrid.tracking.opening import checked
from dphybrid.tracking.tracker import Server
from dphybrid.tracking.writer import create_run
from tests.commands import python
from tests.refusing import refused_with


@contextmanager
def serving() -> Iterator[tuple[str, list[str]]]:
    """Yield a server's address and the Authorization of each request."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Authorization", ""))
            self.send_response_only(200 if asked[-1] != "Bearer wrong" else 401)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_doctor_sends_the_token_and_takes_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (address, asked):
        for token, good in (("right", True), ("wrong", False)):
            monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
            passed, told = checked(f"{address}/", Path())
            assert (passed, asked[-1]) == (good, f"Bearer {token}")
            assert ("_TOKEN" in told) != good


def test_servers_of_this_machine_are_asked_without_a_proxy() -> None:
    code = "import sys, dphybrid; from dphybrid.util.asking import ask; print(ask(sys.argv[1]).content)"
    with serving() as (address, _):
        environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "NO_PROXY": "example.org"}
        assert python("-c", code, address, env=environment).stdout == "b'{}'\n"


def test_a_refused_run_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "wrong")
    with serving() as (address, _), refused_with([address, "refuses to record a run", "--tracking none"]):
        create_run(Server(address, "some", tmp_path), "run", "")
