"""A run on two machines through Prefect, each a worker of this one with a home of its own."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dphybrid.recipes.configs import load_config
from dphybrid.run.pages import Report
from dphybrid.run.train import run_job
from tests.cluster.launching import BASE, SMALL, needs_torchrec, settings_in, write_clicks
from tests.conftest import REPOSITORY
from tests.flows.conftest import team  # noqa: F401 - the servers, for this folder, too
from tests.flows.servers import Team
from tests.waiting import wait_until

pytestmark = [
    needs_torchrec,
    pytest.mark.slow,
    pytest.mark.skipif("DPHYBRID_LONG_TESTS" not in os.environ, reason="minutes: DPHYBRID_LONG_TESTS=1"),
]
OWN = ["model.factory=tests.cluster.mortal:build", "model.dropout=0.2", "checkpoint.every_steps=3"]
CLUSTER = "train-hybrid/train-cluster"


@pytest.fixture
def two_workers(team: Team) -> Iterator[Team]:  # noqa: F811
    slow = {"DPHYBRID_FACTORY_PACKAGES": "tests", "MORTAL_SLOW_S": "0.3"}
    team.start_machine("one", 1, "any", **slow)
    team.start_machine("two", 1, **slow)
    wait_until(lambda: len(team.post("/work_pools/gpu/workers/filter", {})) > 1, "both are known", 60)
    yield team
    team.end_workers()


def engine_of(flow_run: Any) -> psutil.Process:
    """Return the process of a flow run."""
    for process in psutil.process_iter(["environ", "cmdline"]):
        environ, command = process.info["environ"] or {}, process.info["cmdline"] or []
        if environ.get("PREFECT__FLOW_RUN_ID") == flow_run["id"] and "prefect" in " ".join(command):
            return process
    raise AssertionError(f"flow run {flow_run['name']} has no process")


def test_two_machines_train_one_run_though_one_dies_and_end_together(
    two_workers: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clicks = write_clicks(tmp_path / "clicks.csv")
    values = [*BASE, *SMALL, *OWN, f"data.path={clicks}"]
    (head,) = two_workers.run_many([(CLUSTER, {"overrides": values})])
    folder = two_workers.wait_for_checkpoint(head)
    died = two_workers.runs_of("join-hybrid")[0]
    engine_of(died).kill()
    two_workers.wait_for(head, "Completed", "Failed", "Crashed", timeout_s=150)
    assert two_workers.state(head) == "Completed", two_workers.lines_of(head)
    assert two_workers.flow_run(head)["run_count"] > 1
    last = two_workers.runs_of("join-hybrid")[0]
    assert last["id"] != died["id"]
    two_workers.wait_for(last["id"], "Completed", timeout_s=20)
    report = Report.read(folder / "report.json")
    assert report.devices == "2 x 1 ranks on cpu"
    assert {row.device for row in report.splits} >= {"rank 0", "rank 1"}
    for run in (head, last["id"]):
        assert "Resuming from" in (said := two_workers.lines_of(run)) or "epoch 3" in said, said

    client = two_workers.mlflow
    wanted = f"tags.`prefect.flow_run_id` = '{head}'"
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (recorded,) = client.search_runs(experiments, filter_string=wanted)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.params["devices"] == report.devices

    # The same by ranks of one machine, in one go.
    monkeypatch.chdir(REPOSITORY)
    local = run_job(
        load_config(None, [*values, "cluster.ranks=2"]), settings_in(tmp_path / "data"), run_name="local"
    )
    assert local.metrics == report.metrics
    assert local.digests == report.digests
