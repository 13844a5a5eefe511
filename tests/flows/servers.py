"""Real servers and workers: PostgreSQL, Prefect on it, workers with stand-in GPUs; each can be killed."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil

from tests.commands import python
from tests.postgres import Postgres, free_port
from tests.stores import put_database
from tests.waiting import patience, wait_until

REPOSITORY = Path(__file__).parent.parent.parent
PREFECT = str(Path(sys.executable).parent / "prefect")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the caller's environment, but with a test's settings of Prefect, MLflow and dphybrid, whose
    databases have their tables."""
    put_database("prefect", folder / "prefect" / "prefect.db")
    put_database("mlflow", folder / "data" / "mlflow" / "mlflow.db")
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "DPHYBRID_", "MLFLOW_"))
    }
    own = {
        "DPHYBRID_DATA_DIR": str(folder / "data"),
        "DPHYBRID_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "PYTHONUNBUFFERED": "1",
    }
    return base | own | more


@dataclass
class Team:
    """A Prefect server, and workers on one machine with stand-in GPUs. started: what `end` kills."""

    folder: Path
    postgres: Postgres | None
    port: int = field(default_factory=free_port)
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def gpus(self) -> Path:
        return self.folder / "nvml.json"

    @property
    def leases(self) -> Path:
        return self.folder / "leases"

    @property
    def runs(self) -> Path:
        return self.folder / "data" / "runs"

    def env(self, **more: str) -> dict[str, str]:
        gpus = {
            "FAKE_NVML": str(self.gpus),
            "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{self.folder}",
            "DPHYBRID_NVML": "tests.fake_nvml",
            "DPHYBRID_LEASE_DIR": str(self.leases),
        }
        server = {
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER": "P30D",
            "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
            "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_PLUGINS_ENABLED": "true",
            "PREFECT_CLIENT_MAX_RETRIES": "9",
        }
        if self.postgres:
            address = f"postgresql+asyncpg://{self.postgres.address}"
            server["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = address
        return environment(self.folder, **(gpus | server | more))

    def start(self, argv: list[str], log: str, **more: str) -> "subprocess.Popen[bytes]":
        """Start a process in a new session, outside of the repository, whose files it must not need."""
        with (self.folder / log).open("ab") as stream:
            child = subprocess.Popen(
                argv,
                stdout=stream,
                stderr=stream,
                env=self.env(**more),
                cwd=self.folder,
                start_new_session=True,
            )
        self.started.append(child)
        return child

    def start_server(self) -> "subprocess.Popen[bytes]":
        server = self.start(
            [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(self.port)], "server.log"
        )

        def healthy() -> bool:
            try:
                urllib.request.urlopen(f"{self.api}/health", timeout=5)
            except OSError:
                assert server.poll() is None, (self.folder / "server.log").read_text()[-3000:]
                return False
            return True

        wait_until(healthy, "the server answers", 150)
        return server

    def start_worker(self, name: str, *more: str, **env: str) -> "subprocess.Popen[bytes]":
        return self.start(
            [sys.executable, "-m", "dphybrid", "worker", "--name", name, *more],
            f"{name}.log",
            **env,
        )

    def start_machine(self, name: str, limit: int, *queues: str, **env: str) -> "subprocess.Popen[bytes]":
        """Start a worker with its own PREFECT_HOME, which represents another machine."""
        given = [flag for queue in (name, *queues) for flag in ("--queue", queue)]
        home = str(self.folder / f"home-{name}")
        return self.start_worker(name, "--limit", str(limit), *given, PREFECT_HOME=home, **env)

    def end_workers(self) -> None:
        for child in self.started:
            if "worker" in child.args:  # type: ignore[operator]
                kill_tree(child)

    def command(self, *argv: str, timeout: float = 200) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, env=self.env(), cwd=REPOSITORY, timeout=timeout
        )

    def run_many(self, wanted: list[tuple[str, dict[str, Any]]]) -> list[UUID]:
        """Queue flow runs and return their ids. wanted: (deployment or FLOW/DEPLOYMENT, parameters) each."""
        code = (
            "import json, sys; from prefect.deployments import run_deployment\n"
            "for name, parameters in json.load(sys.stdin):\n"
            "    print('id', run_deployment(name, parameters=parameters, timeout=0).id)"
        )
        page = json.dumps([(name if "/" in name else f"{name}/{name}", given) for name, given in wanted])
        done = python("-c", code, input=page, env=self.env(), timeout=120)
        return [UUID(text) for text in re.findall(r"id (\S+)", done.stdout)]

    def post(self, path: str, page: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """Send a request; return the answer. method: by default GET without a page and POST with one."""
        data = None if page is None else json.dumps(page).encode()
        request = urllib.request.Request(
            f"{self.api}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or b"null")

    def flow_run(self, flow_run_id: UUID) -> dict[str, Any]:
        found: dict[str, Any] = self.post(f"/flow_runs/{flow_run_id}")
        return found

    def state(self, flow_run_id: UUID) -> str:
        return str(self.flow_run(flow_run_id)["state"]["name"])

    def cancel(self, flow_run_id: UUID) -> None:
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.post(f"/flow_runs/{flow_run_id}/set_state", {"state": state})

    @property
    def mlflow(self) -> Any:
        """A client of the MLflow store in which the runs are recorded."""
        from mlflow.tracking import MlflowClient

        return MlflowClient(f"sqlite:///{self.folder}/data/mlflow/mlflow.db")

    def lines_of(self, flow_run_id: UUID | str) -> str:
        """Return the log lines of a flow run."""
        wanted = {"logs": {"flow_run_id": {"any_": [str(flow_run_id)]}}}
        return "\n".join(line["message"] for line in self.post("/logs/filter", wanted))

    def wait_for(self, flow_run_id: UUID, *names: str, timeout_s: float = 120) -> None:
        wait_until(lambda: self.state(flow_run_id) in names, f"flow run is {' or '.join(names)}", timeout_s)

    def folder_of(self, flow_run_id: UUID) -> Path | None:
        """Return the run folder that a flow run made."""
        for page in self.runs.glob("*/run.json"):
            if json.loads(page.read_text())["tags"].get("prefect.flow_run_id") == str(flow_run_id):
                return page.parent
        return None

    def wait_for_checkpoint(self, flow_run_id: UUID) -> Path:
        def found() -> Path | None:
            folder = self.folder_of(flow_run_id)
            return folder if folder and list(folder.glob("checkpoints/step-*/state.json")) else None

        folder: Path = wait_until(found, "a checkpoint is there", 120)
        return folder

    def holders(self) -> dict[str, int]:
        """Return GPU -> process that holds its lease, found by trying the kernel's locks."""
        from dphybrid.gpus.leases import find_holder

        pages = json.loads(self.gpus.read_text())["gpus"]
        return {gpu["uuid"]: holder.pid for gpu in pages if (holder := find_holder(self.leases, gpu["uuid"]))}

    def logs(self) -> str:
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}"
            for file in sorted(self.folder.glob("*.log"))
        )

    def end(self) -> None:
        for child in reversed(self.started):
            kill_tree(child)
        if self.postgres:
            self.postgres.end()


def kill_tree(child: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all its children with SIGKILL, as when a machine loses power."""
    if child.poll() is not None:
        return  # another process may have this number by now
    below = psutil.Process(child.pid).children(recursive=True)
    for process in below:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    child.kill()
    child.wait(patience(20))
