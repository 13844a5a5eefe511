"""Prefect servers, started once for all tests of this folder that need one. They end when their process
leaves the folder: an idle server computes, too."""

from collections.abc import Iterator

import pytest
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_DATABASE_CONNECTION_URL, temporary_settings

from dphybrid.cli.main import main
from dphybrid.orchestration.embedded import in_this_process, start_server
from tests.conftest import LONG
from tests.fake_nvml import gpu, write_state
from tests.flows.servers import REPOSITORY, Team
from tests.postgres import Postgres
from tests.stores import put_database


@pytest.fixture(scope="package")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """A server with pool, queues and deployments, and four stand-in GPUs. Tests start their own workers.

    Its database is a copy of a finished one of SQLite; for the nightly tests it is PostgreSQL."""
    folder = tmp_path_factory.mktemp("team")
    team = Team(folder, Postgres() if LONG else None)
    (folder / "slowly.py").write_text((REPOSITORY / "tests" / "flows" / "slowly.py").read_text())
    write_state(team.gpus, [gpu(number) for number in range(4)])
    try:
        team.start_server()
        with temporary_settings({PREFECT_API_URL: team.api}):
            hosts = ("--host", "one", "--host", "two")
            assert main(["deploy", *hosts, "--file", str(REPOSITORY / "prefect.yaml")]) == 0, team.logs()
        yield team
    finally:
        team.end()


@pytest.fixture(scope="package")
def _temporary_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = tmp_path_factory.mktemp("prefect") / "prefect.db"
    put_database("prefect", database)
    own = {PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{database}"}
    with temporary_settings(own, restore_defaults={PREFECT_API_URL}):
        server = start_server()
    yield server.api_url
    APILogHandler().flush()  # or this process would send its last lines to a stopped server for minutes
    server.stop()


@pytest.fixture
def prefect_server(_temporary_server: str) -> Iterator[None]:
    """A temporary server for the flows that a test calls in this process."""
    with temporary_settings({PREFECT_API_URL: _temporary_server}), in_this_process():
        yield
