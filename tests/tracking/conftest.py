"""MLflow servers as separate processes, each with its own port, on SQLite or PostgreSQL."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.postgres import Postgres, free_port
from tests.stores import put_database
from tests.waiting import patience


@dataclass
class MlflowServer:
    """A server that can be killed and started again. backend: address of its database."""

    folder: Path
    backend: str
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        if self.backend.startswith("sqlite:///"):
            put_database("mlflow", Path(self.backend.removeprefix("sqlite:///")))
        # The program that `mlflow server` starts, with the variables that it sets: saves importing MLflow.
        environment = os.environ | {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "_MLFLOW_SERVER_FILE_STORE": self.backend,
            "_MLFLOW_SERVER_REGISTRY_STORE": self.backend,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(self.folder / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        }
        command = ["uvicorn", "mlflow.server.fastapi_app:app", "--port", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + patience(180)
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
        """Kill it and its workers with SIGKILL, as when the machine loses power."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def postgres_uri() -> Iterator[str]:
    """The address of a PostgreSQL server for these tests."""
    postgres = Postgres()
    yield f"postgresql://{postgres.address}"
    postgres.end()
