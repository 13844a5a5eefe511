"""The deployments of prefect.yaml on a real server: set up twice, and run as the quick start has it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from uuid import UUID

import polars as pl
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from sklearn.metrics import roc_auc_score

from dphybrid.cli.main import main
from dphybrid.orchestration.checking import PACKAGED
from tests.flows.servers import Team
from tests.test_pages import commands, write_visits
from tests.waiting import patience

WRITE, ADDRESS, DEPLOY, RETRAIN, PREDICT = commands(deployed=True)


def typed(team: Team, folder: Path, line: str) -> str:
    """Type a line in a shell, for the team's server; return what it prints. It must succeed."""
    done = subprocess.run(
        line.replace("http://127.0.0.1:4200/api", team.api),
        shell=True,
        cwd=folder,
        env=team.env(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr + team.logs()
    return done.stdout


@pytest.fixture(scope="module")
def deployed(team: Team, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `deploy` tells for one more host, on a server that was set up for two."""
    shown, elsewhere = StringIO(), tmp_path_factory.mktemp("deployed")
    with temporary_settings({PREFECT_API_URL: team.api}), chdir(elsewhere), redirect_stdout(shown):
        assert main([*shlex.split(DEPLOY)[1:], "--host", "three"]) == 0
    return shown.getvalue()


@pytest.fixture(scope="module")
def worker(team: Team) -> Iterator["subprocess.Popen[bytes]"]:
    worker = team.start_worker("printed")
    yield worker
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(patience(30)) == 0


@pytest.mark.slow
def test_setting_up_again_changes_nothing_and_doubles_nothing(team: Team, deployed: str) -> None:
    assert f"Deployments, as in {PACKAGED}" in deployed
    assert "machine died': unchanged" in deployed
    automations = [page["name"] for page in team.post("/automations/filter", {})]
    assert automations == ["dphybrid: notice runs whose machine died"]
    queues = sorted(team.post("/work_pools/gpu/queues/filter", {}), key=lambda queue: queue["priority"])
    hosts, shared = ["three", "one", "two"], ["urgent", "any", "night"]
    by_priority = [queue["name"] for queue in queues if queue["name"] in hosts + shared]
    assert by_priority == hosts + shared, "hosts' queues stay before the shared ones"
    (told,) = re.findall("^Queues of pool gpu, by priority: (.*)$", deployed, flags=re.MULTILINE)
    assert [name for name in told.split(", ") if name in hosts + shared] == by_priority
    deployments = {page["name"]: page for page in team.post("/deployments/filter", {})}
    assert set(deployments) == {"train-hybrid", "retrain-hybrid", "sweep-hybrid", "clean-up"}
    assert deployments["clean-up"]["parameters"] == {"keep_days": 30}
    for page in deployments.values():
        assert page["pull_steps"] == []
        assert "dphybrid" in page["tags"]
        assert [(schedule["active"], schedule["schedule"]["timezone"]) for schedule in page["schedules"]] == [
            (False, "Etc/UTC")
        ] * (page["name"] != "sweep-hybrid"), "each schedule once"
    retrain = deployments["retrain-hybrid"]
    assert retrain["global_concurrency_limit"]["limit"] == 1
    assert retrain["concurrency_options"]["collision_strategy"] == "ENQUEUE"


@pytest.mark.slow
def test_the_command_that_deploy_prints_runs_to_completion(
    team: Team, deployed: str, worker: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    """It shows epochs, metric and address, and the run is on record in Prefect and in MLflow."""
    (line,) = (line for line in deployed.splitlines() if line.startswith("Run: "))
    overrides = json.dumps(["recipe=hybrid", "devices=cpu*2", "train.epochs=2"])
    bare = line.removeprefix("Run: ").replace("train-hybrid/", "")
    command = f"{bare} --param overrides='{overrides}' --watch-timeout 300"
    shown = " ".join(typed(team, tmp_path, command).split())
    for words in ("epoch 2/2: train loss", "validation mse", "MLflow: dphybrid ui hybrid-"):
        assert words in shown
    processes = [found := psutil.Process(worker.pid), *found.children(recursive=True)]
    sockets = [c for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {socket.laddr.ip for socket in sockets} <= {"127.0.0.1"}
    client = team.mlflow
    experiment = client.get_experiment_by_name("dphybrid/hybrid")
    run = client.search_runs([experiment.experiment_id])[0]
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.deployment_name"] == "train-hybrid"
    assert "prefect.flow_run_url" in run.data.tags
    assert run.data.tags["dphybrid.replicas"] == "2"
    assert "perf/step_ms" in run.data.metrics
    assert "splits.txt" in {item.path for item in client.list_artifacts(run.info.run_id)}
    assert len(client.search_logged_models([experiment.experiment_id])) >= 1
    flow_run = team.flow_run(UUID(run.data.tags["prefect.flow_run_id"]))
    assert flow_run["name"] == run.info.run_name
    assert set(flow_run["tags"]) == {"dphybrid", "hybrid", "cpu*2"}
    wanted = {"artifacts": {"flow_run_id": {"any_": [flow_run["id"]]}}}
    artifacts = {page["key"]: page for page in team.post("/artifacts/filter", wanted)}
    assert artifacts.keys() == {"mlflow-run", "metrics", "splits", "result"}
    assert artifacts["mlflow-run"]["data"] == f"`dphybrid ui {run.info.run_name}`"


@pytest.mark.nightly
def test_the_page_retrains_and_scores(
    team: Team,
    deployed: str,
    worker: "subprocess.Popen[bytes]",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = write_visits(1500, 300)
    typed(team, tmp_path, f"{WRITE} && {ADDRESS} && {RETRAIN}")
    wanted = {"flows": {"name": {"any_": ["retrain-hybrid"]}}, "sort": "START_TIME_DESC"}
    state = team.post("/flow_runs/filter", wanted)[0]["state"]
    assert state["name"] == "Promoted"
    assert state["message"].startswith("the challenger of visits is ")
    typed(team, tmp_path, PREDICT)
    scored = pl.read_csv(tmp_path / "scored.csv")
    assert len(scored) == len(answers) == 300
    assert roc_auc_score(answers, scored["probability"]) > 0.55
