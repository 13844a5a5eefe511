"""MLflow servers as processes of their own, on a port of their own, with SQLite or PostgreSQL behind them."""

import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class MlflowServer:
    """A server that can be killed and started again. backend: where its runs are."""

    folder: Path
    backend: str
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = ["mlflow", "server", "--backend-store-uri", self.backend, "--workers", "1", "--port", str(self.port)]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + 180
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5)
                return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.3)
        raise RuntimeError(f"the server did not start: {(self.folder / 'server.log').read_text()[-2000:]}")

    def kill(self) -> None:
        """kill -9, with its workers, as when the machine loses power."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def postgres_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server of these tests' own."""
    programs = sorted(glob.glob("/usr/lib/postgresql/*/bin")) or [str(Path(p).parent) for p in [shutil.which("initdb")] if p]
    if not programs:
        pytest.skip("PostgreSQL is not installed (Debian's package postgresql)")
    binaries, folder, port = Path(programs[-1]), tmp_path_factory.mktemp("postgres"), free_port()
    as_user: Callable[[list[str]], list[str]] = list
    if os.geteuid() == 0:  # it refuses to run as root
        for parent in [folder, *folder.parents]:
            if parent.owner() == "root" and str(parent).startswith("/tmp/"):
                parent.chmod(0o755)
        shutil.chown(folder, "postgres")
        as_user = lambda command: ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]  # noqa: E731
    data = folder / "data"
    initdb = [str(binaries / "initdb"), "-D", str(data), "-U", "dphybrid", "--auth=trust", "--no-sync"]
    subprocess.run(as_user(initdb), check=True, capture_output=True)
    options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder} -c fsync=off"
    control = [str(binaries / "pg_ctl"), "-D", str(data), "-w"]
    subprocess.run(as_user([*control, "-o", options, "-l", str(folder / "log"), "start"]), check=True, capture_output=True)
    try:
        yield f"postgresql://dphybrid@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run(as_user([*control, "-m", "immediate", "stop"]), check=False, capture_output=True)


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[Callable[[str], MlflowServer]]:
    """Start servers that end with the test."""
    servers: list[MlflowServer] = []

    def start(backend: str) -> MlflowServer:
        folder = tmp_path / f"server-{len(servers)}"
        folder.mkdir()
        server = MlflowServer(folder, backend.format(folder=folder))
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()
