"""The flow as people start it: in this process without a server, and by a worker of a real server."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from uuid import UUID, uuid4

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_DATABASE_CONNECTION_URL, temporary_settings

from dphybrid.gpus import lease_folder
from dphybrid.recipes.registry import find_recipe
from dphybrid.util.shared_files import own_folder
from flows import train_hybrid
from tests.commands import command
from tests.flows.servers import REPOSITORY, Team, environment
from tests.waiting import patience


def flow(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.train_hybrid", *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=environment(folder),
        timeout=300,
    )


@pytest.mark.slow
def test_the_flow_runs_without_a_server_and_reuses_prepared_data(tmp_path: Path, data_dir: Path) -> None:
    command("prepare", "--recipe", "toy")
    first = flow(tmp_path, "--recipe", "toy", "--devices", "cpu*3", "--report", str(tmp_path / "report.json"))
    assert first.returncode == 0, first.stderr
    assert (
        "Let's use 3 devices!\n\tIn Model: input size torch.Size([10, 5]) output size torch.Size([10, 2])\n"
        in first.stdout
    )
    assert "Reusing prepared data" in first.stdout
    assert "Task run" not in first.stdout + first.stderr  # the flow says each step itself
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run_id"] in first.stdout
    assert report["best_checkpoint"] in first.stdout
    assert report["ui_command"] in first.stdout
    assert Path(report["best_checkpoint"], "state.json").is_file()
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as tables:

        def counts(query: str) -> dict[str, int]:
            return dict(tables.execute(query).fetchall())

        assert counts("SELECT state_name, count(*) FROM flow_run GROUP BY 1") == {"Completed": 1}
        assert counts("SELECT state_name, count(*) FROM task_run GROUP BY 1") == {"Completed": 5}
        assert counts("SELECT 'log', count(DISTINCT flow_run_id) FROM log") == {"log": 1}
        assert set(counts("SELECT key, count(*) FROM artifact GROUP BY 1").items()) == {
            (key, 1) for key in ("mlflow-run", "progress", "metrics", "splits", "result")
        }
        told = counts("SELECT event, count(*) FROM events GROUP BY 1")
        assert (told["prefect.flow-run.Completed"], told["prefect.task-run.Completed"]) == (1, 5)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--recipe", "txt"], ["recipe", "'txt'"]),
        (["--train.batch-size", "-1"], ["train.batch_size"]),
        (["--nonsense"], ["--nonsense", "--help"]),
        (["--data.path", "nowhere.txt"], ["error: data.path=nowhere.txt: there is no such file"]),
    ],
)
def test_wrong_flags_end_before_anything_starts(
    argv: list[str],
    words: list[str],
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_hybrid, "in_this_process", lambda: pytest.fail("a server starts"))
    try:
        code = train_hybrid.main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    told = capsys.readouterr().err
    assert code == 2
    for word in words:
        assert word in told
    assert "Traceback" not in told


def run_until_signalled(folder: Path, options: list[str], number: int) -> tuple[int, str]:
    """Start a long run, send a signal to it and all below it once it trains; return its exit code and what it
    printed."""
    argv = [sys.executable, "-m", "flows.train_hybrid", *options, "--train.epochs", "4000"]
    log = folder / "log"
    with log.open("wb") as stream:
        # A session of its own, as a terminal makes one: a signal of the terminal reaches every process in it,
        # the embedded server too.
        child = subprocess.Popen(
            argv,
            stdout=stream,
            stderr=stream,
            env=environment(folder),
            cwd=REPOSITORY,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + patience(120)
        while b"epoch 1/4000" not in log.read_bytes():
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)
        os.killpg(child.pid, number)
        return child.wait(patience(60)), log.read_text()
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_checkpoints_at_once_and_resume_goes_on(
    tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model.hidden", "16", "--model.dim", "16", "--train.patience", "0"]
    code, shown = run_until_signalled(tmp_path, options, signal.SIGINT)
    assert code == 130
    assert shown.count("stopped by Ctrl-C after step") == 1
    assert "Traceback" not in shown
    assert "Crash detected" not in shown
    (folder,) = (tmp_path / "data" / "runs").iterdir()
    database = {PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/prefect/prefect.db"}
    with temporary_settings(database, restore_defaults={PREFECT_API_URL}):
        assert train_hybrid.main([*options, "--train.epochs", "3", "--resume"]) == 0
    assert f"Going on from {folder}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_all_its_processes_ends_a_run_soon(number: int, tmp_path: Path) -> None:
    """Closing the terminal, or a service manager's stop; SIGTERM ends the embedded server before the flow can
    tell it that it ends."""
    code, shown = run_until_signalled(tmp_path, ["--recipe", "hybrid", "--train.patience", "0"], number)
    assert code == 128 + number
    assert "after step" in shown
    assert list((tmp_path / "data" / "runs").glob("*/checkpoints/step-*"))


WRONG = [
    (["train-hybrid", "--param", 'config={"train": {"epochs": -1}}'], ["epochs"]),
    (
        [
            "train-hybrid",
            "--param",
            'config={"model": {"kind": "transformer", "hidden": 100, "heads": 3}}',
        ],
        ["hidden=100", "heads=3"],
    ),
    (
        ["train-hybrid", "--param", 'overrides=["train.epoch=3"]'],
        ["train.epoch", "did you mean 'train.epochs'"],
    ),
    (["train-hybrid", "--param", "epoch=3"], ["epoch", "not found on the deployment"]),
    (["train-hybrid", "--param", "epochs=-1"], ["train.epochs"]),
    (["sweep-hybrid", "--param", 'grid={"train.epochs": [1, -1]}'], ["train.epochs", "-1"]),
    (["retrain-hybrid"], ["checkpoint.register_as"]),
    (["train-kge", "--param", "label=clicked"], ["label", "not found on the deployment"]),
    (
        ["train-hybrid", "--param", 'config={"recipe": "ctr"}'],
        ["runs recipe text", "recipe=ctr", "train-ctr"],
    ),
    (["train-ctr", "--param", 'config={"train": {"epochs": 3}}'], ["recipe", "required"]),
    (["train-hybrd"], ["train-hybrd", "not found"]),
]
"""Words of a command -> what it tells."""

RUN_EACH = """
import json, sys
from prefect.cli import app
for argv in json.load(sys.stdin):
    sys.argv = ["prefect", "deployment", "run", *argv]
    code = 0
    try:
        app()
    except SystemExit as end:  # which a process of its own ends with
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    print(f"=== {1 if isinstance(code, str) else code}", flush=True)
"""
"""Runs commands of `prefect deployment run` one after another, as each process of its own takes seconds to
import Prefect."""


@pytest.mark.slow
def test_wrong_parameters_fail_before_anything_is_scheduled(team: Team) -> None:
    before = team.post("/flow_runs/count", {})
    ended = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=json.dumps([argv for argv, _ in WRONG]),
        capture_output=True,
        text=True,
        check=True,
        env=team.env(),
        cwd=REPOSITORY,
        timeout=300,
    )
    *told, after = re.split(r"^=== ", ended.stdout, flags=re.MULTILINE)
    codes = [page.partition("\n")[0] for page in [*told[1:], after]]
    assert "0" not in codes
    told = [told[0], *(page.partition("\n")[2] for page in told[1:])]
    assert len(told) == len(WRONG), ended.stdout
    for (argv, words), page in zip(WRONG, told, strict=True):
        for word in words:
            assert word in page + ended.stderr, (argv, page)
    assert "Traceback" not in ended.stderr
    assert team.post("/flow_runs/count", {}) == before


def set_up_again(team: Team) -> str:
    """Setting up again changes nothing and doubles nothing; return what it tells."""
    done = team.command(
        sys.executable, "-m", "dphybrid.orchestration.setup", "--host", "one", "--host", "two"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "brought up to date" in done.stdout
    automations = [page["name"] for page in team.post("/automations/filter", {})]
    assert sorted(automations) == ["dphybrid: notice runs whose machine died", "retrain-on-new-data"]
    queues = {queue["name"]: queue["priority"] for queue in team.post("/work_pools/gpu/queues/filter", {})}
    assert queues["one"] < queues["two"] < queues["urgent"] < queues["any"] < queues["night"]
    deployments = {page["name"]: page for page in team.post("/deployments/filter", {})}
    trainings = {f"train-{name}" for name in ("hybrid", "tutorial-hybrid", "ctr", "kge", "retrieval")}
    trainings.add("train-cluster")
    assert set(deployments) == trainings | {"join-hybrid", "retrain-hybrid", "sweep-hybrid"}
    assert deployments.pop("join-hybrid")["parameters"] == {}
    assert deployments["train-cluster"]["global_concurrency_limit"]["limit"] == 1
    for page in deployments.values():
        assert page["pull_steps"] == []
        recipe = page["parameters"]["config"]["recipe"]
        # the form is empty, and says what the recipe sets
        own = {"table": {"optimizer": "adagrad"}} if page["name"] == "train-cluster" else {}
        assert page["parameters"]["config"] == {"recipe": recipe, **own}
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
    return done.stdout


@pytest.mark.slow
def test_the_command_that_deploy_prints_runs_to_completion(team: Team, tmp_path: Path) -> None:
    """It shows epochs, metric and address, and the run is on record in Prefect and in MLflow."""
    done = set_up_again(team)
    (line,) = (line for line in done.splitlines() if line.startswith("Run: "))
    live = own_folder(lease_folder(team.leases) / f"runs-{os.getuid()}")
    (live / "flow-x.run").touch()
    os.mkfifo(live / f"flow-{uuid4()}.run")
    worker = team.start_worker("printed")
    overrides = json.dumps(["devices=cpu*2", "train.epochs=2"])
    watched = subprocess.run(
        ["bash", "-c", f"{line.removeprefix('Run: ')} --param overrides='{overrides}' --watch-timeout 300"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=team.env(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        timeout=400,
    )
    assert watched.returncode == 0, watched.stdout + watched.stderr + team.logs()
    shown = " ".join(watched.stdout.split())
    for words in ("epoch 2/2: train loss", "validation: mse", "MLflow: dphybrid ui hybrid-"):
        assert words in shown
    processes = [found := psutil.Process(worker.pid), *found.children(recursive=True)]
    sockets = [c for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {socket.laddr.ip for socket in sockets} <= {"127.0.0.1"}
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(patience(30)) == 0
    assert (team.folder / "printed.log").read_text().count(
        "flow-x.run: is not a file of a live run; it is left alone"
    ) == 1

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{team.folder}/data/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("dphybrid")
    assert experiment is not None
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
    assert f"/runs/{run.info.run_id}?" in artifacts["mlflow-run"]["data"]
    assert artifacts["progress"]["data"] == 100
    assert artifacts["progress"]["description"].startswith("epoch 2 of 2, step ")
