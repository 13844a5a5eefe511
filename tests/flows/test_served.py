"""The quick start's commands that need a server and a worker, as the page has them, and what is refused."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import polars as pl
import psutil
import pytest
import yaml
from sklearn.metrics import roc_auc_score

from dphybrid.recipes.registry import find_recipe
from tests.flows.servers import REPOSITORY, Team
from tests.test_pages import commands, write_visits
from tests.waiting import patience, wait_until

WRITE, ADDRESS, DEPLOY, RETRAIN, PREDICT = commands(deployed=True)


TERMINAL = """
import contextlib, io, json, os, shlex, sys
from dphybrid.cli.main import main as dphybrid
from prefect.cli import app

def prefect(argv):
    sys.argv = ["prefect", *argv]
    try:
        app()
    except SystemExit as end:  # which a process of its own ends with
        if not isinstance(end.code, str):
            return end.code or 0
        print(end.code)
        return 1
    return 0

for asked in sys.stdin:
    os.environ["PWD"], line = json.loads(asked)
    os.chdir(os.environ["PWD"])
    words = [os.path.expandvars(word) for word in shlex.split(line) if word != "export"]
    while words and "=" in words[0]:
        os.environ.update([words.pop(0).split("=", 1)])
    code, shown = 0, io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        if words:
            code = {"prefect": prefect, "dphybrid": dphybrid}[words[0]](words[1:])
    print(json.dumps([code, shown.getvalue()]), file=sys.__stdout__, flush=True)
"""
"""Runs one command after another: as a process of its own, each would import Prefect for seconds."""


@dataclass
class Terminal:
    """A terminal in which people type commands for the team's server."""

    team: Team
    process: "subprocess.Popen[str]"

    def types(self, folder: Path, *lines: str) -> str:
        """Type lines in a folder; return what the last one prints. All must succeed."""
        for line in lines:
            code, shown = self.ends(folder, line)
            assert code == 0, shown + self.team.logs()
        return shown

    def ends(self, folder: Path, line: str) -> tuple[int, str]:
        """Type a line; return its exit code and what it prints."""
        line = line.replace("http://127.0.0.1:4200/api", self.team.api)
        print(json.dumps([str(folder), line]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"{line} ended the terminal"
        code, shown = json.loads(answer)
        return code, shown


@pytest.fixture(scope="module")
def terminal(team: Team) -> Iterator[Terminal]:
    with subprocess.Popen(
        [sys.executable, "-c", TERMINAL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=team.env(),
        cwd=team.folder,
    ) as process:
        yield Terminal(team, process)


@pytest.fixture(scope="module")
def deployed(terminal: Terminal, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the page's deployment tells for one more host, on a server that was set up for two."""
    return terminal.types(tmp_path_factory.mktemp("deployed"), ADDRESS, f"{DEPLOY} --host three")


@pytest.fixture(scope="module")
def worker(team: Team) -> Iterator["subprocess.Popen[bytes]"]:
    worker = team.start_worker("printed")
    yield worker
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(patience(30)) == 0


TABLE = "train-ctr --param data_path=x.csv --param label=y"
WRONG = [
    (f"""{TABLE} --param 'config={{"recipe": "ctr", "train": {{"epochs": -1}}}}'""", ["epochs"]),
    ("train-hybrid --param epoch=3", ["epoch", "not found on the deployment"]),
    ("train-kge --param label=clicked", ["label", "not found on the deployment"]),
    (f"""{TABLE} --param 'config={{"train": {{"epochs": 3}}}}'""", ["recipe", "required"]),
    ("train-hybrd", ["train-hybrd", "not found"]),
]
"""Words of a command -> what it tells."""


@pytest.mark.slow
def test_wrong_parameters_fail_before_anything_is_scheduled(team: Team, terminal: Terminal) -> None:
    before = team.post("/flow_runs/count", {})
    for words, told in WRONG:
        code, shown = terminal.ends(REPOSITORY, f"prefect deployment run {words}")
        assert code != 0
        for word in told:
            assert word in shown, words
        assert "Traceback" not in shown
    assert team.post("/flow_runs/count", {}) == before


@pytest.mark.slow
def test_setting_up_again_changes_nothing_and_doubles_nothing(team: Team, deployed: str) -> None:
    assert "Deployments: those of the package" in deployed
    assert "machine died': unchanged" in deployed
    automations = [page["name"] for page in team.post("/automations/filter", {})]
    assert sorted(automations) == ["dphybrid: notice runs whose machine died", "retrain-on-new-data"]
    queues = sorted(team.post("/work_pools/gpu/queues/filter", {}), key=lambda queue: queue["priority"])
    hosts, shared = ["three", "one", "two"], ["urgent", "any", "night"]
    by_priority = [queue["name"] for queue in queues if queue["name"] in hosts + shared]
    assert by_priority == hosts + shared, "hosts' queues stay before the shared ones"
    (told,) = re.findall("^Queues of pool gpu, by priority: (.*)$", deployed, flags=re.MULTILINE)
    assert [name for name in told.split(", ") if name in hosts + shared] == by_priority
    deployments = {page["name"]: page for page in team.post("/deployments/filter", {})}
    trainings = {f"train-{name}" for name in ("hybrid", "tutorial-hybrid", "ctr", "kge", "retrieval")}
    assert set(deployments) == trainings | {"retrain-hybrid", "sweep-hybrid", "clean-up"}
    form = deployments.pop("train-hybrid")["parameter_openapi_schema"]["properties"]
    first = sorted(form, key=lambda name: form[name]["position"])[:4]
    assert first == ["data_path", "label", "recipe", "devices"]
    assert deployments.pop("clean-up")["parameters"] == {"keep_days": 30}
    for page in deployments.values():
        assert page["pull_steps"] == []
        recipe = page["parameters"]["config"]["recipe"]
        # the form is empty, and says what the recipe sets
        assert page["parameters"]["config"] == {"recipe": recipe}
        form = page["parameter_openapi_schema"]["properties"]
        assert form["config"]["properties"]["recipe"]["enum"] == [recipe]
        shown = set(form["config"]["properties"]["data"]["properties"])
        assert find_recipe(recipe).data.model_fields.keys() - shown <= {"path", "label"}
        assert "dphybrid" in page["tags"]
        assert all(
            not schedule["active"] and schedule["schedule"]["timezone"] == "Etc/UTC"
            for schedule in page["schedules"]
        )
    retrain = deployments["retrain-hybrid"]
    assert retrain["global_concurrency_limit"]["limit"] == 1
    assert retrain["concurrency_options"]["collision_strategy"] == "ENQUEUE"


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """A prefect.yaml with one deployment of its own."""
    file = tmp_path / "prefect.yaml"
    page = {
        "pull": [],
        "deployments": [
            {
                "name": "own",
                "description": "Ours.\n",
                "entrypoint": "dphybrid.flows.train_hybrid:train_hybrid",
                "tags": ["dphybrid"],
                "parameters": {"config": {"recipe": "ctr"}, "epochs": 2, "label": "old"},
                "work_pool": {"name": "gpu", "work_queue_name": "any"},
                "schedules": [
                    {"slug": "nightly", "cron": "0 2 * * *", "timezone": "Etc/UTC", "active": False},
                    {"interval": "PT1H", "active": False},
                    {"slug": "gone", "cron": "0 4 * * *", "timezone": "Etc/UTC", "active": False},
                ],
                "triggers": [
                    {"name": "own-trigger", "expect": ["x.y"], "match": {"prefect.resource.id": "x"}}
                ],
            }
        ],
    }
    file.write_text(yaml.safe_dump(page))
    return file


def changed(file: Path, **values: Any) -> None:
    page = yaml.safe_load(file.read_text())
    page["deployments"][0] |= values
    file.write_text(yaml.safe_dump(page))


@pytest.mark.nightly
def test_deploying_again_renews_the_code_and_keeps_what_was_set_unless_it_is_reset(
    team: Team, terminal: Terminal, own_file: Path
) -> None:
    deploy = f"dphybrid deploy --file {own_file}"

    def own() -> dict[str, Any]:
        page: dict[str, Any] = team.post("/deployments/name/train-hybrid/own")
        return page

    def schedules() -> dict[str, Any]:
        return {page["slug"] or str(page["schedule"].get("interval")): page for page in own()["schedules"]}

    def automation(name: str) -> Any:
        (found,) = team.post("/automations/filter", {"automations": {"name": {"any_": [name]}}})
        return found

    noticing = "dphybrid: notice runs whose machine died"
    assert "own:" not in terminal.types(own_file.parent, deploy)
    trigger = automation(noticing)["trigger"]["id"]
    path = f"/deployments/{own()['id']}"
    # Somebody sets parameters, a schedule with parameters, another one on, a pause, a limit, and more.
    config = {"recipe": "ctr", "train": {"seed": 7}}
    team.post(
        path,
        {
            "parameters": {"config": config, "epochs": 5, "label": "new", "lr": 0.01},
            "paused": True,
            "concurrency_limit": 3,
            "work_queue_name": "night",
            "work_pool_name": "gpu",
            "entrypoint": "dphybrid.flows.an_earlier_version:train",
            "parameter_openapi_schema": {"type": "object", "properties": {}},
            "version": "earlier",
        },
        method="PATCH",
    )
    cron = {"cron": "0 5 * * *", "timezone": "Europe/Berlin"}
    weekly = {"schedule": cron, "slug": "weekly", "active": True, "parameters": {"data_path": "/data/w"}}
    team.post(f"{path}/schedules", [weekly])
    team.post(f"{path}/schedules/{schedules()['nightly']['id']}", {"active": True}, method="PATCH")
    team.post(f"/automations/{automation('own-trigger')['id']}", {"enabled": False}, method="PATCH")
    before, page = own(), yaml.safe_load(own_file.read_text())["deployments"][0]
    changed(own_file, **page | {"schedules": page["schedules"][:2], "description": "Ours, better."})
    told = terminal.types(own_file.parent, deploy)
    for line in (
        "own: parameters.epochs: 5 on the server stays; the file has 2",
        "own: parameters.lr: 0.01 on the server stays; the file has nothing",
        "own: schedules.nightly: ",
        "own: schedules.weekly: 0 5 * * * Europe/Berlin, on with ",
        "own: paused: true on the server stays; the file has nothing",
        "`dphybrid deploy --reset` sets all of them as in prefect.yaml",
        f"Automation '{noticing}': unchanged",
    ):
        assert line in told
    now = own()
    renewed = {"entrypoint", "version", "parameter_openapi_schema", "description", "updated", "version_info"}
    assert {name for name in now if now[name] != before[name]} <= renewed | {"version_id", "branch"}
    assert now["entrypoint"] == page["entrypoint"]
    assert now["description"] == "Ours, better."
    assert "data_path" in now["parameter_openapi_schema"]["properties"]
    assert now["version"] != "earlier"
    assert not automation("own-trigger")["enabled"]
    assert automation(noticing)["trigger"]["id"] == trigger, "it still knows the runs that it watches"

    told = terminal.types(own_file.parent, f"{deploy} --reset")
    assert "stays" not in told
    now = own()
    assert now["id"] == before["id"]
    assert now["parameters"] == page["parameters"]
    assert not now["paused"]
    assert now["global_concurrency_limit"] is None
    assert now["work_queue_name"] == "any"
    assert {name: page["active"] for name, page in schedules().items()} == {
        "nightly": False,
        "3600.0": False,
    }
    assert automation("own-trigger")["enabled"]
    assert "stays" not in terminal.types(own_file.parent, deploy)

    def planned() -> list[datetime]:
        mine = (run for run in team.runs_of("train-hybrid") if run["deployment_id"] == now["id"])
        return sorted(datetime.fromisoformat(run["expected_start_time"]) for run in mine)

    # Every second a run falls due, in a queue without a worker.
    team.post(path, {"work_pool_name": "gpu", "work_queue_name": "one"}, method="PATCH")
    team.post(f"{path}/schedules", [{"schedule": {"interval": 1}, "slug": "seconds", "active": True}])
    wait_until(planned, "the server schedules runs")
    terminal.types(own_file.parent, deploy)
    wait_until(lambda: planned()[-1] > datetime.now(UTC) + timedelta(seconds=30), "they are scheduled again")
    assert set(np.diff(planned())) == {timedelta(seconds=1)}, "no run that fell due meanwhile is lost"
    team.post(path, method="DELETE")


@pytest.mark.slow
def test_the_command_that_deploy_prints_runs_to_completion(
    team: Team, terminal: Terminal, deployed: str, worker: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    """It shows epochs, metric and address, and the run is on record in Prefect and in MLflow."""
    (line,) = (line for line in deployed.splitlines() if line.startswith("Run: "))
    overrides = json.dumps(["devices=cpu*2", "train.epochs=2"])
    command = f"{line.removeprefix('Run: ')} --param overrides='{overrides}' --watch-timeout 300"
    shown = " ".join(terminal.types(tmp_path, command).split())
    for words in ("epoch 2/2: train loss", "validation mse", "MLflow: dphybrid ui hybrid-"):
        assert words in shown
    processes = [found := psutil.Process(worker.pid), *found.children(recursive=True)]
    sockets = [c for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {socket.laddr.ip for socket in sockets} <= {"127.0.0.1"}
    client = team.mlflow
    experiment = client.get_experiment_by_name("dphybrid/hybrid")
    run = client.search_runs([experiment.experiment_id])[0]
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.deployment_name"] == "train-tutorial-hybrid"
    assert "Prefect flow run" in run.data.tags["mlflow.note.content"]
    assert run.data.tags["dphybrid.replicas"] == "2"
    assert "perf/step_ms" in run.data.metrics
    assert "split_shapes.json" in {item.path for item in client.list_artifacts(run.info.run_id)}
    assert len(client.search_logged_models([experiment.experiment_id])) >= 1
    flow_run = team.flow_run(UUID(run.data.tags["prefect.flow_run_id"]))
    assert flow_run["name"] == run.info.run_name
    assert set(flow_run["tags"]) == {"dphybrid", "hybrid", "cpu*2"}
    wanted = {"artifacts": {"flow_run_id": {"any_": [flow_run["id"]]}}}
    artifacts = {page["key"]: page for page in team.post("/artifacts/filter", wanted)}
    assert artifacts.keys() == {"mlflow-run", "progress", "metrics", "splits", "result"}
    assert artifacts["mlflow-run"]["data"] == f"`dphybrid ui {run.info.run_name}`"
    assert artifacts["progress"]["data"] == 100
    assert artifacts["progress"]["description"].startswith("epoch 2 of 2, step ")


@pytest.mark.nightly
def test_the_page_retrains_and_scores(
    team: Team,
    terminal: Terminal,
    deployed: str,
    worker: "subprocess.Popen[bytes]",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = write_visits(1500, 300)
    terminal.types(tmp_path, WRITE, ADDRESS, RETRAIN)
    (decision,) = team.post("/artifacts/latest/filter", {"artifacts": {"key": {"any_": ["decision"]}}})
    assert decision["data"].startswith("Promoted: the challenger of visits is ")
    terminal.types(tmp_path, PREDICT)
    scored = pl.read_csv(tmp_path / "scored.csv")
    assert len(scored) == len(answers) == 300
    assert roc_auc_score(answers, scored["probability"]) > 0.55
