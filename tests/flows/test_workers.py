"""Workstations that are shared, die and come back: what workers take from the queue, leave there for others,
and give back. Real workers of a real server, on stand-in GPUs."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dphybrid.orchestration.queueing import SILENT
from tests.fake_nvml import gpu, write_state
from tests.flows.servers import Team, kill_tree
from tests.waiting import patience, wait_until

pytestmark = pytest.mark.nightly

SHORT = ["recipe=hybrid", "model.factory=slowly:build", "train.epochs=1", "train.batch_size=256"]
LONG = [*SHORT, "train.epochs=20", "train.patience=0", "devices=auto*1"]


@pytest.fixture(autouse=True)
def no_workers_left(team: Team) -> Iterator[None]:
    write_state(team.gpus, [gpu(number) for number in range(4)])
    yield
    team.end_workers()


def engines(team: Team) -> list[psutil.Process]:
    """The processes of flow runs."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command = " ".join(process.info["cmdline"] or [])
        if (
            "prefect" in command
            and "engine" in command
            and (process.info["environ"] or {}).get("DPHYBRID_LEASE_DIR") == str(team.leases)
        ):
            found.append(process)
    return found


def outcome(folder: Path) -> Any:
    """What must be equal bit for bit."""
    report = json.loads((folder / "report.json").read_text())
    return report["digests"], report["metrics"]


def mlflow_run(team: Team, folder: Path) -> Any:
    return team.mlflow.get_run(json.loads((folder / "run.json").read_text())["run_id"])


@pytest.mark.slow
def test_runs_share_four_gpus_though_a_worker_is_killed(team: Team) -> None:
    each = 4 if os.environ.get("DPHYBRID_LONG_TESTS") else 2  # runs of one GPU, of two and of three
    workers = [team.start_worker(name, "--limit", "3", SLOW="0.1") for name in ("one", "two")]
    wanted = [
        ("train-hybrid", {"overrides": [*SHORT, f"devices=auto*{1 + i % 3}", f"train.seed={i}"]})
        for i in range(3 * each)
    ]
    runs = team.run_many(wanted)
    wait_until(lambda: len(team.holders()) >= 2, "GPUs are leased", 120)
    killed = {child.pid for child in psutil.Process(workers[0].pid).children(recursive=True)}
    kill_tree(workers[0])
    wait_until(lambda: not killed & set(team.holders().values()), "the dead hold no GPU", 5)
    workers[0] = team.start_worker("one", "--limit", "3", SLOW="0.1")
    alone = wait_until(lambda: set(team.holders().values()), "the other worker's runs go on", 120).pop()
    os.kill(alone, signal.SIGKILL)  # its worker lives and sees it
    # the dead worker's runs are missed after 200 s without heartbeats
    wait_until(lambda: all(team.state(run) == "Completed" for run in runs), "all runs end", 500)
    assert not list(team.leases.glob("*.collision-*"))
    assert not team.holders()
    assert not list(team.leases.glob("*.ticket"))
    assert any(team.flow_run(run)["run_count"] > 1 for run in runs)
    pages = [json.loads((team.folder_of(run) or Path()).joinpath("run.json").read_text()) for run in runs]
    leased = sorted(len(page["tags"]["dphybrid.gpus"].split(",")) for page in pages)
    assert leased == [1] * each + [2] * each + [3] * each
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    assert [worker.wait(patience(30)) for worker in workers] == [0, 0], team.logs()


@pytest.mark.slow
def test_interrupted_runs_go_on_with_the_same_bits(team: Team) -> None:
    free = [gpu(number) for number in range(4)]
    slow = {"SLOW": "0.12"}
    one, two = (
        team.start_worker(name, "--limit", "4", "--queue", name, "--queue", "any", **slow)
        for name in ("one", "two")
    )
    undisturbed, orphaned, yielding, cancelled = runs = team.run_many(
        [("train-hybrid", {"overrides": LONG})] * 4
    )
    folders = [team.wait_for_checkpoint(run) for run in runs]

    # Somebody asks for the GPU of one of them: it goes back to the queue.
    owners = {pid: uuid for uuid, pid in team.holders().items()}
    by_folder = {folder: pid for folder in folders for pid in owners if _is_run(pid, team, folder)}
    number = [unit["uuid"] for unit in free].index(owners[by_folder[folders[2]]])
    asked = team.command(sys.executable, "-m", "dphybrid", "devices", "--ask", str(number))
    assert "asked to give way" in asked.stdout, asked.stderr
    wait_until(lambda: by_folder[folders[2]] not in team.holders().values(), "it gives way", 30)

    # Cancelled: the process ends within 30 s, with a checkpoint; MLflow says KILLED.
    process = psutil.Process(by_folder[folders[3]])
    team.cancel(cancelled)
    process.wait(patience(30))
    team.wait_for(cancelled, "Cancelled", timeout_s=30)
    assert mlflow_run(team, folders[3]).info.status == "KILLED"
    lines = team.lines_of(cancelled)
    assert "Finished in state Cancelled('stopped by " in lines
    assert "Crash detected" not in lines
    assert "Traceback" not in lines

    # One worker dies alone; its runs end in good order, and others take them up.
    os.kill(one.pid, signal.SIGKILL)
    one.wait(patience(10))
    wait_until(lambda: not [p for p in engines(team) if p.ppid() == 1], "no orphan goes on", 30)
    # A release: the other worker is asked to end; it checkpoints what it has and leaves.
    two.send_signal(signal.SIGTERM)
    assert two.wait(patience(40)) == 0, team.logs()
    assert not team.holders()
    three = team.start_worker("three", "--limit", "4", SLOW="0")
    for run in (undisturbed, orphaned, yielding):
        team.wait_for(run, "Completed")
        assert team.flow_run(run)["run_count"] > 1
    three.send_signal(signal.SIGHUP)  # its terminal ends; it does not
    for more in (["--resume", folders[3].name], ["--run-name", "reference"]):
        config = str(_config(folders[3]))
        trained = team.command(sys.executable, "-m", "dphybrid", "train", "--config", config, *more)
        assert trained.returncode == 0, trained.stdout + trained.stderr
    for folder in folders:
        assert outcome(folder) == outcome(team.runs / "reference")
        assert mlflow_run(team, folder).info.status == "FINISHED"
    three.send_signal(signal.SIGTERM)
    assert three.wait(patience(30)) == 0


@pytest.mark.slow
def test_training_outlives_the_server_and_its_database(team: Team) -> None:
    worker = team.start_worker("one", "--limit", "2", SLOW="0.15")
    ends_meanwhile, cancelled_after = team.run_many(
        [("train-hybrid", {"overrides": [*LONG, f"train.epochs={epochs}"]}) for epochs in (5, 600)]
    )
    folders = [team.wait_for_checkpoint(run) for run in (ends_meanwhile, cancelled_after)]
    server = next(child for child in team.started if "server" in child.args)  # type: ignore[operator]
    kill_tree(server)
    team.postgres.control("-m", "fast", "restart")
    down = time.monotonic()
    wait_until(lambda: (folders[0] / "report.json").is_file(), "the shorter run ends without a server", 60)
    steps = max(folders[1].glob("checkpoints/step-*")).name
    time.sleep(max(0.0, 60 - (time.monotonic() - down)))
    assert max(folders[1].glob("checkpoints/step-*")).name > steps
    team.start_server()
    team.wait_for(ends_meanwhile, "Completed", timeout_s=150)
    # Prefect's own observer of cancellations is dead by now; the run's own guard is not.
    assert team.state(cancelled_after) == "Running"
    team.cancel(cancelled_after)
    team.wait_for(cancelled_after, "Cancelled", timeout_s=60)
    assert mlflow_run(team, folders[1]).info.status == "KILLED"
    assert not team.holders()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(patience(30)) == 0


def _is_run(pid: int, team: Team, folder: Path) -> bool:
    """Whether a process trains a folder's run: its lease and the run's tags have the flow run's name."""
    name = json.loads((folder / "run.json").read_text())["tags"]["prefect.flow_run_name"]
    files = team.leases.glob("gpu-*.lock")
    pages = [json.loads(file.read_text().partition("\n")[0] or "{}") for file in files]
    return any(page.get("pid") == pid and page.get("run") == name for page in pages)


def _config(folder: Path) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads((folder / "run.json").read_text())["config"]))
    return file


SHORTLY = """
import asyncio, sys
from datetime import timedelta
from dphybrid.orchestration import setup
setup.SILENT_FOR = timedelta(seconds=float(sys.argv[1]))
print(asyncio.run(setup._upsert_automation()))
"""


@pytest.mark.slow
def test_a_server_that_was_down_when_a_run_fell_silent_notices_it(team: Team) -> None:
    assert "updated" in team.command(sys.executable, "-c", SHORTLY, "10").stdout
    try:
        (run,) = team.run_many([("train-hybrid", {"overrides": SHORT})])
        state = {"type": "RUNNING", "name": "Running"}
        team.post(f"/flow_runs/{run}/set_state", {"state": state, "force": True})
        time.sleep(3)  # the event reaches the automation
        kill_tree(next(child for child in reversed(team.started) if "server" in child.args))  # type: ignore[operator]
        time.sleep(75)  # Prefect drops what ended more than a minute ago, unless it is told to keep it
        team.start_server()
        team.wait_for(run, "Crashed", timeout_s=60)
        assert team.flow_run(run)["state"]["message"] == SILENT
    finally:
        team.command(sys.executable, "-c", SHORTLY, "200")


def busy_machine(team: Team, name: str, gpus: list[dict[str, object]]) -> dict[str, str]:
    """Return the variables of another workstation, with these GPUs."""
    file = Path(team.folder / f"{name}.json")
    write_state(file, gpus)
    return {"FAKE_NVML": str(file), "DPHYBRID_LEASE_DIR": str(team.folder / f"leases-{name}")}


@pytest.mark.slow
def test_a_worker_without_a_free_gpu_leaves_runs_for_others(team: Team) -> None:
    full = busy_machine(team, "full", [gpu(number, load=99) for number in range(2)])
    team.start_machine("full", 2, "any", **full)
    on_gpu, on_cpu = team.run_many(
        [("train-hybrid", {"overrides": [*SHORT, f"devices={devices}"]}) for devices in ("auto*1", "cpu")]
    )
    team.wait_for(on_cpu, "Completed")
    log = (team.folder / "full.log").read_text()
    assert "no GPU is free here; left in the queue, for other workers: 1 run" in log
    assert team.state(on_gpu) in ("Scheduled", "Late")
    team.start_machine("two", 1, "any", "night")
    team.wait_for(on_gpu, "Completed")
