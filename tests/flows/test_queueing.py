"""Late runs, the order of queues, and what a worker's machine knows of its runs."""

import asyncio
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from prefect.context import FlowRunContext

from dphybrid.orchestration import setup, worker
from dphybrid.orchestration.checking import PACKAGED, check_values, read_page
from dphybrid.orchestration.queueing import STARTED_BY, too_late
from dphybrid.orchestration.setup import check
from dphybrid.util.alive import process_name
from tests.conftest import REPOSITORY
from tests.refusing import refused
from tests.waiting import patience, wait_until


@pytest.mark.parametrize(
    ("late_min", "limit_min", "auto", "count", "skipped"),
    [
        (200, 180, True, 1, True),
        (170, 180, True, 1, False),
        (200, 0, True, 1, False),  # no limit
        (200, 180, False, 1, False),  # somebody asked for it
        (200, 180, True, 2, False),  # it began in time and goes on now
    ],
)
def test_scheduled_runs_that_come_too_late_are_left_out(
    late_min: int, limit_min: int, auto: bool, count: int, skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    when = datetime.now(UTC) - timedelta(minutes=late_min)
    run = SimpleNamespace(auto_scheduled=auto, expected_start_time=when, run_count=count)
    run.start_time = when + timedelta(minutes=late_min)
    monkeypatch.setattr(FlowRunContext, "get", classmethod(lambda cls: SimpleNamespace(flow_run=run)))
    state = too_late(limit_min)
    assert (state is not None) == skipped
    if state is not None:
        assert state.is_completed()
        assert state.name == "SkippedLate"
        assert "200 minutes ago" in (state.message or "")


_RUN = """
import os, signal, sys, time
from dphybrid.orchestration.supervised import watching_worker
from dphybrid.util.stop import StopRequest
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
with watching_worker(StopRequest(), every_s=0.1):
    time.sleep(float(sys.argv[1]))
os._exit(0)
"""


@pytest.mark.parametrize("dies", ["before", "meanwhile", "never"])
def test_a_run_ends_when_its_worker_dies_even_before_it_has_begun(
    dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as worker:
        monkeypatch.setenv(STARTED_BY, f"{process_name(worker.pid)} token")
        if dies == "before":
            worker.kill()
            worker.wait()
        run = [sys.executable, "-c", _RUN, "2" if dies == "never" else "60"]
        with subprocess.Popen(run, cwd=REPOSITORY) as process:
            if dies == "meanwhile":
                wait_until(lambda: psutil.Process(process.pid).num_threads() > 1, "it watches", 60)
                worker.kill()
            assert process.wait(patience(30)) == (0 if dies == "never" else 7)
        worker.kill()


_CHILD = "trap 'exit 3' TERM; echo; while :; do sleep 0.05; done"


@pytest.mark.parametrize("wait", [False, True])
def test_a_worker_asks_each_run_for_a_checkpoint_once_and_kills_at_the_third_signal(
    wait: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "_LOOK_EVERY_S", 0.05)
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> None:
        child = subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()  # it has set its traps

    async def ends(place: int) -> None:
        await asyncio.to_thread(started[place].wait, patience(20))

    async def start() -> None:
        begin(_CHILD)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.3) if wait else await ends(0)
        begin(_CHILD)  # of a run that was being taken at the signal
        await asyncio.sleep(0.3) if wait else await ends(1)
        assert [run.poll() is None for run in started] == [wait, wait]
        os.kill(os.getpid(), signal.SIGINT)
        await ends(0)
        await ends(1)
        begin("trap '' TERM; echo; while :; do sleep 0.05; done")
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        await ends(2)
        one.num_running = 0
        await asyncio.sleep(60)

    one = SimpleNamespace(name="one", start=start, num_running=1, draining=False)
    try:
        assert asyncio.run(worker.work(one, "gpu", wait)) == 0  # type: ignore[arg-type]
        assert [run.returncode for run in started] == [3, 3, -signal.SIGKILL]
    finally:
        for run in started:
            run.kill()
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_deployments_are_checked_with_their_schedules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(REPOSITORY / "prefect.yaml")
    deployments = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    schedules = [schedule for deployment in deployments for schedule in deployment.get("schedules", [])]
    assert len(deployments) >= 8
    assert len(schedules) >= 5
    assert capsys.readouterr().out.count(": valid\n") == len(deployments) + len(schedules)
    text = (REPOSITORY / "prefect.yaml").read_text()
    for before, after, words in (
        ("skip_if_late_min: 120", "skip_if_late_min: soon", "train-hybrid.*skip_if_late_min"),
        ("timezone: Etc/UTC", "timezone: Mars/Base", "schedule nightly: timezone: .*[Tt]ime ?zone"),
        (
            'cron: "30 3 * * *"',
            'cron: "30 33 * * *"',
            "retrain-hybrid, schedule nightly: cron: Invalid cron string: [^\n]*30 33[^\n]*$",
        ),
        ("cron: ", "crn: ", "retrain-hybrid, schedule nightly: has no cron, interval or rrule; give one"),
        (
            "        recipe: ctr",
            "        recipe: ctr\n        train: {epochs: -1}",
            "retrain-hybrid: .*epochs",
        ),
        ('"auto*1", "auto*2"]', '"auto*1", "gpu2"]', "sweep-hybrid: .*gpu2"),
        ('["auto*1", "auto*2"]', "auto", "sweep-hybrid: grid: devices = 'auto'; give a list"),
        (
            "active: false # set",
            "active: true # set",
            "retrain-hybrid, schedule nightly: checkpoint.register_as is not set",
        ),
        ("active: false # set", "active: yess # set", "active: must be .*true or false"),
        ("flows.train_hybrid:train_hybrid", "flows.train_hybrid:train_hybird", "no flow 'train_hybird'"),
    ):
        assert before in text, before
        (tmp_path / "prefect.yaml").write_text(text.replace(before, after))
        with refused(f"(?sm){words}"):
            check(tmp_path / "prefect.yaml")


def test_a_searchs_ranges_are_checked_by_their_ends() -> None:
    grid = {"train.lr": {"low": 1e-4, "high": 0.1, "log": True}, "model.dim": [8, 16]}
    check_values({"grid": grid, "trials": 5})
    with refused("train.lr = '-1'"):
        check_values({"grid": {"train.lr": {"low": -1, "high": 0.1}}, "trials": 5})
    for wrong in ({"low": 1e-4, "high": 0.1}, 256, "0.1"):
        with refused("grid: train.lr = .*give a list of values"):
            check_values({"grid": {"train.lr": wrong}})


FLOW = "entrypoint: dphybrid.flows.train_hybrid:train_hybrid"
NO_PAGES = ["[1, 2]", "7", "text", "&a {deployments: *a}", "deployments: &a [*a]", "deployments: {}"]
NO_PAGES += ["deployments: []", "a: 1", "deployments: [7]", "\x00", "a: [", "[" * 3000]
DEPLOYMENTS = {
    "entrypoint: ''": "entrypoint = '': ",
    "entrypoint: .train:f": "entrypoint = '.train:f': ",
    f"{FLOW}, parameters: &p {{config: *p}}": "deployment a",
    f"{FLOW}, schedules: [{{parameters: [1]}}]": "parameters",
    f"{FLOW}, schedules: [7]": "deployment a: schedules: must be a list of mappings",
    f"{FLOW}, schedules: {{cron: '* * *'}}": "deployment a: schedules: must be a list of mappings",
    f"{FLOW}, schedules: [{{cron: 5, timezone: 7}}]": "schedule 1: cron: ",
    f"{FLOW}, schedules: [{{cron: '* * *', timezone: UTC}}]": "schedule 1: cron: Invalid cron string",
}


@pytest.mark.parametrize(
    ("page", "words"),
    [
        *((page, r"prefect\.yaml: ") for page in NO_PAGES),
        *((f"deployments: [{{name: a, {page}}}]", words) for page, words in DEPLOYMENTS.items()),
    ],
)
def test_a_file_of_odd_deployments_is_told(page: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "prefect.yaml").write_text(page)
    with refused(words):
        check(tmp_path / "prefect.yaml")


def test_a_local_file_is_laid_over_the_packages_deployments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged, named = read_page(None)
    assert named == PACKAGED
    setup.write(None)
    with refused("prefect.local.yaml: cannot be written: File exists"):
        setup.write(None)
    page, named = read_page(None)
    assert named.name == "prefect.local.yaml"
    setup.check(None)
    names = [entry["name"] for entry in page["deployments"]]
    assert names == [*(entry["name"] for entry in packaged["deployments"]), "train-mine"]
    (before, after) = (
        next(entry for entry in each["deployments"] if entry["name"] == "retrain-hybrid")
        for each in (packaged, page)
    )
    assert after["parameters"] == before["parameters"] | {
        "data_path": "/data/clicks",
        "label": "clicked",
        "register_as": "clicks",
    }
    assert after["triggers"] == before["triggers"]
    (tmp_path / "prefect.local.yaml").write_text("deployments: [{name: mine}]")
    with refused("prefect.local.yaml: deployment mine needs an entrypoint"):
        read_page(None)
