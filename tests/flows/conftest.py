"""One Prefect server on PostgreSQL for all tests of this folder that need one."""

import sys
from collections.abc import Iterator

import pytest

from tests.fake_nvml import gpu, write_state
from tests.flows.servers import REPOSITORY, Team
from tests.postgres import Postgres


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """A server that is set up, with four stand-in GPUs; tests start the workers that they need."""
    folder = tmp_path_factory.mktemp("team")
    postgres = Postgres()
    team = Team(folder, postgres)
    (folder / "slowly.py").write_text((REPOSITORY / "tests" / "flows" / "slowly.py").read_text())
    write_state(team.gpus, [gpu(number) for number in range(4)])
    postgres.control("start")
    try:
        team.start_server()
        done = team.command(
            sys.executable, "-m", "dphybrid.orchestration.setup", "--host", "one", "--host", "two"
        )
        assert done.returncode == 0, done.stdout + done.stderr + team.logs()
        yield team
    finally:
        team.end()
        postgres.end()
