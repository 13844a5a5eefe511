"""Whose run it is, and what a worker does with foreign files and other people's deployments."""

import asyncio
import os
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, StateType

from dphybrid.orchestration import alive
from dphybrid.orchestration.plugin import refuse_wrong_parameters
from dphybrid.orchestration.queueing import BEGUN, HOME, STARTED_BY, lives_elsewhere
from dphybrid.orchestration.worker import GuardedConfiguration, check_job
from dphybrid.util.importing import ONLY
from tests.refusing import refused
from tests.test_shared_folder import NOBODY, ODD


class Server:
    """Prefect's, with runs that have been running for a while. queued: those that were queued again."""

    def __init__(self) -> None:
        self.homes: dict[UUID, str] = {}
        self.starts: dict[UUID, int] = {}
        self.queued: list[UUID] = []

    def read_flow_run(self, flow_run_id: UUID) -> Any:
        state = SimpleNamespace(type=StateType.RUNNING, timestamp=datetime.now(UTC) - timedelta(minutes=5))
        labels = {HOME: self.homes[flow_run_id], BEGUN: self.starts.get(flow_run_id, 1)}
        return SimpleNamespace(
            id=flow_run_id, name="run", labels=labels, state=state, deployment_id=uuid4(), run_count=20
        )

    def set_flow_run_state(self, flow_run_id: UUID, _state: object, force: bool) -> None:
        assert force
        self.queued.append(flow_run_id)


def test_a_workers_run_imports_from_the_workers_packages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_FACTORY_PACKAGES", "mine")
    job = GuardedConfiguration()
    job.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="run"))
    assert job.env[ONLY] == "mine"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("DPHYBRID_LEASE_DIR", str(tmp_path / "leases"))
    server = Server()
    monkeypatch.setattr(alive, "get_client", lambda **_: nullcontext(server))
    return server


def dead_run(server: Server, home: str | None = None) -> UUID:
    """A run that this machine started long ago. home: what the server says instead of that."""
    flow_run_id = uuid4()
    words = alive.mark_start(str(flow_run_id))
    server.homes[flow_run_id] = home or words
    long_ago = time.time() - 3600
    os.utime(alive.run_file(str(flow_run_id)), (long_ago, long_ago))
    return flow_run_id


def test_a_dead_run_is_queued_again_only_where_it_is_at_home(server: Server) -> None:
    here, elsewhere = dead_run(server), dead_run(server, "77 token other-host")
    assert len(alive.queue_dead_runs(set())) == 1
    assert server.queued == [here]
    assert not alive.run_file(str(elsewhere)).exists()
    assert alive.queue_dead_runs(set()) == []


def test_a_run_that_kills_its_machine_is_not_begun_for_ever(server: Server) -> None:
    flow_run_id = dead_run(server)
    server.starts[flow_run_id] = alive.MAX_RUNS
    assert "not queued again" in alive.queue_dead_runs(set())[0]


def test_a_process_knows_when_its_run_lives_elsewhere(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow_run_id = dead_run(server)
    assert not lives_elsewhere(server.read_flow_run(flow_run_id))  # no worker of ours started it
    monkeypatch.setenv(STARTED_BY, server.homes[flow_run_id])
    # though Prefect's count has grown with its waiting
    assert not lives_elsewhere(server.read_flow_run(flow_run_id))
    server.homes[flow_run_id] = "77 token other-host"
    assert lives_elsewhere(server.read_flow_run(flow_run_id))


def test_a_run_that_is_about_to_tell_its_home_is_left_alone(server: Server) -> None:
    flow_run_id = uuid4()
    server.homes[flow_run_id] = "77 token other-host"
    alive.mark_start(str(flow_run_id))
    assert alive.queue_dead_runs(set()) == []
    assert alive.run_file(str(flow_run_id)).exists()


@pytest.mark.parametrize("kind", ODD)
def test_files_that_are_none_of_its_runs_are_told_once(kind: str, server: Server, tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "victim").write_text("precious")  # where the odd files' links lead
    (tmp_path / "leases").chmod(0o1777)
    folder = alive.live_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "flow-x.run").touch()
    (folder / "notes").touch()
    (folder / f"flow-{uuid4()}.run\n").touch()
    ODD[kind](folder / f"flow-{uuid4()}.run")
    foreign = folder / f"flow-{uuid4()}.run"
    foreign.touch()
    if os.getuid() == 0:
        os.chown(foreign, NOBODY, NOBODY)
    else:
        foreign.unlink()
    real, told = dead_run(server), set[str]()
    lines = alive.queue_dead_runs(told)
    assert server.queued == [real]
    odd = 4 + (os.getuid() == 0)
    assert len(lines) == odd + 1
    assert sum("left alone" in line for line in lines) == odd
    assert alive.queue_dead_runs(told) == []
    assert len(list(folder.iterdir())) == odd


def test_somebody_who_takes_the_place_of_the_folder_is_told(server: Server, tmp_path: Path) -> None:
    leases = alive.live_folder().parent
    alive.live_folder().rmdir()
    (leases / f"runs-{os.getuid()}").symlink_to(tmp_path)
    with refused(r"is not a folder; remove it"):
        alive.live_folder()


SHELL = [{"prefect.deployments.steps.run_shell_script": {"script": "id"}}]
HARMLESS = [{"prefect.deployments.steps.set_working_directory": {"directory": "/tmp"}}]


@pytest.mark.parametrize(
    ("job", "steps", "field"),
    [
        ({}, [], ""),
        ({}, HARMLESS, ""),
        ({"command": "sh -c id"}, [], "command"),
        ({"env": {"PYTHONPATH": "/tmp"}}, [], "env"),
        ({"working_dir": "/tmp"}, None, "working_dir"),
        ({}, SHELL, "pull_steps"),
    ],
)
def test_a_worker_takes_no_commands_unless_it_is_set_to(
    job: dict[str, Any], steps: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = GuardedConfiguration(**job)
    deployment = SimpleNamespace(pull_steps=steps, entrypoint="dphybrid.flows.train_hybrid:train_hybrid")
    monkeypatch.delenv("DPHYBRID_WORKER_ALLOWS", raising=False)
    if not field:
        check_job(given, deployment)  # type: ignore[arg-type]
        return
    with refused(f"no {field} .*DPHYBRID_WORKER_ALLOWS={field}"):
        check_job(given, deployment)  # type: ignore[arg-type]
    monkeypatch.setenv("DPHYBRID_WORKER_ALLOWS", field)
    check_job(given, deployment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entrypoint", "packages", "words"),
    [
        ("dphybrid.flows.train_hybrid:train_hybrid", "", ""),
        ("mine.flows:nightly", "others, mine", ""),
        ("mine.flows:nightly", "", "would run code of package 'mine'"),
        ("/home/eve/evil.py:flow", "mine", "flows of packages alone"),
        ("evil.py:flow", "evil", "flows of packages alone"),
        ("dphybrid/../evil.py:flow", "", "flows of packages alone"),
        ("dphybrid.py:flow", "", "flows of packages alone"),
        ("dphybrid.evil", "", "flows of packages alone"),
        ("", "", "flows of packages alone"),
    ],
)
def test_a_worker_runs_flows_of_named_packages_alone(
    entrypoint: str, packages: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_FACTORY_PACKAGES", packages)
    job, deployment = GuardedConfiguration(), SimpleNamespace(pull_steps=None, entrypoint=entrypoint)
    if not words:
        check_job(job, deployment)  # type: ignore[arg-type]
        return
    with refused(f"deployment's entrypoint .*{words}"):
        check_job(job, deployment)  # type: ignore[arg-type]


class OneDeployment:
    """Answers with one deployment, whose parameters somebody else wrote."""

    def __init__(self, **parameters: Any) -> None:
        self.deployment = SimpleNamespace(
            name="train", tags=["dphybrid"], entrypoint="", parameters=parameters
        )

    async def read_deployment(self, _: str) -> Any:
        return self.deployment


@pytest.mark.parametrize(
    "parameters", [{"overrides": ["recipe=evilmod:Nothing"]}, {"config": {"recipe": "evilmod:Nothing"}}]
)
def test_a_deployment_s_parameters_import_no_foreign_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path, parameters: dict[str, Any]
) -> None:
    (tmp_path / "evilmod.py").write_text("raise SystemExit('evil ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("would run code of package 'evilmod'"):
        asyncio.run(refuse_wrong_parameters(OneDeployment(**parameters), "id", {}))
    assert "evilmod" not in sys.modules
    assert ONLY not in os.environ
    asyncio.run(refuse_wrong_parameters(OneDeployment(config={"recipe": "toy"}), "id", {}))
