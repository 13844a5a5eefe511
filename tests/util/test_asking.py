"""Requests to servers: the token, an own certificate, and a proxy for others."""

import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dphybrid.cli.doctor import _mlflow_server
from dphybrid.config.settings import Settings
from dphybrid.tracking.tracker import Server
from dphybrid.tracking.writer import create_run
from dphybrid.util.asking import ask
from tests.commands import python
from tests.refusing import refused_with


@contextmanager
def serving(certificate: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield a server's address and the Authorization of each request."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Authorization", ""))
            self.send_response_only(200 if asked[-1] != "Bearer wrong" else 401)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    server, scheme = HTTPServer(("127.0.0.1", 0), Handler), "http"
    if certificate is not None:
        context, scheme = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "https"
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"{scheme}://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_doctor_sends_the_token_and_takes_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (address, asked):
        for token, good in (("right", True), ("wrong", False)):
            monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
            ((passed, told),) = _mlflow_server(Settings(tracking_uri=f"{address}/"))
            assert (passed, asked[-1]) == (good, f"Bearer {token}")
            assert ("_TOKEN" in told) != good


def test_a_server_with_an_own_certificate_is_trusted_where_mlflow_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = tmp_path / "own.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -keyout {pem} "
        f"-addext subjectAltName=IP:127.0.0.1 -out {tmp_path / 'cert'}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    pem.write_text(pem.read_text() + (tmp_path / "cert").read_text())
    with serving(certificate=pem) as (address, _):
        assert "CERTIFICATE_VERIFY_FAILED" in ask(address).wrong
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "cert"))
        assert ask(address).content == b"{}"


def test_servers_of_this_machine_are_asked_without_a_proxy() -> None:
    code = "import sys, dphybrid; from dphybrid.util.asking import ask; print(ask(sys.argv[1]).content)"
    with serving() as (address, _):
        environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "NO_PROXY": "example.org"}
        assert python("-c", code, address, env=environment).stdout == "b'{}'\n"


def test_a_refused_run_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "wrong")
    with serving() as (address, _), refused_with([address, "refuses to record a run", "--tracking none"]):
        create_run(Server(address, "some", tmp_path), "run", "")
