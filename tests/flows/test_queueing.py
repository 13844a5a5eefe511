"""What a worker's machine knows of its runs, how a worker ends, and the check of deployments."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dphybrid.orchestration import supervised, worker
from dphybrid.orchestration.checking import PACKAGED
from dphybrid.orchestration.queueing import STARTED_BY
from dphybrid.orchestration.setup import check
from dphybrid.util.alive import process_name
from dphybrid.util.stop import StopRequest
from tests.refusing import refused
from tests.waiting import patience, wait_until


@pytest.mark.parametrize("dies", ["before", "meanwhile", "never"])
def test_a_run_ends_when_its_worker_dies_even_before_it_has_begun(
    dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, stop = list[int](), StopRequest()
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    with subprocess.Popen(["sleep", "600"]) as parent:
        monkeypatch.setenv(STARTED_BY, f"{process_name(parent.pid)} token")
        if dies == "before":
            parent.kill()
            parent.wait()
        with supervised.watching_worker(stop, every_s=0.02):
            if dies == "meanwhile":
                assert not asked
                parent.kill()
            if dies == "never":
                time.sleep(0.2)
            else:
                wait_until(lambda: asked, "it is asked", 20, every_s=0.02)
        parent.kill()
    signal.signal(signal.SIGTERM, before)
    assert asked == [signal.SIGTERM] * (dies != "never")
    assert stop.reason == "the death of its worker" * (dies != "never")


_CHILD = "trap 'exit 3' TERM; echo; while :; do sleep 0.05; done"


def test_a_worker_asks_each_run_once_and_kills_at_the_third_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        await ends(0)
        begin(_CHILD)  # of a run that was being taken at the signal
        await ends(1)
        begin("trap '' TERM; echo; while :; do sleep 0.05; done")
        for _ in range(2):
            await asyncio.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        await ends(2)
        one.num_running = 0
        await asyncio.sleep(60)

    one = SimpleNamespace(name="one", start=start, num_running=1, draining=False)
    try:
        assert asyncio.run(worker.work(one, "gpu")) == 0  # type: ignore[arg-type]
        assert [run.returncode for run in started] == [3, 3, -signal.SIGKILL]
    finally:
        for run in started:
            run.kill()
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_deployments_are_checked_with_their_schedules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PACKAGED.read_text()
    check(None)
    assert capsys.readouterr().out.count(": valid\n") == 4 + 3
    for before, after, words in (
        ("keep_days: 30", "keep_days: soon", "clean-up.*keep_days"),
        ("keep_days: 30", "keep_day: 30", "clean-up.*keep_day"),
        ("timezone: Etc/UTC", "timezone: Mars/Base", "schedule nightly: timezone: .*[Tt]ime ?zone"),
        ('"30 3 * * *"', '"30 33 * * *"', "retrain-hybrid, schedule nightly: cron: Invalid cron string"),
        ("recipe: ctr", "config: {train: {epochs: -1}}", "deployment retrain-hybrid: .*epochs"),
        ("recipe: ctr", "overrides: [train.epoch=1]", "deployment retrain-hybrid: .*epoch"),
        ('"auto*1", "auto*2"]', '"auto*1", "gpu2"]', "sweep-hybrid: .*gpu2"),
        ("slug: weekly", "slug: weekly\n        parameters: {days: 3}", "clean-up, schedule weekly: .*days"),
        ("active: false", "active: true", "retrain-hybrid, schedule nightly: register_as is not set"),
        ("flows.train_hybrid:train_hybrid", "flows.train_hybrid:train_hybird", "no flow 'train_hybird'"),
    ):
        assert before in text, before
        (tmp_path / "prefect.yaml").write_text(text.replace(before, after))
        with refused(f"(?sm){words}"):
            check(tmp_path / "prefect.yaml")


@pytest.mark.parametrize("page", ["[1, 2]", "deployments: 7", "a: [", "\x00", "deployments: [{name: a}]"])
def test_a_file_without_deployments_is_told(page: str, tmp_path: Path) -> None:
    (tmp_path / "prefect.yaml").write_text(page)
    with refused(r"prefect\.yaml: (needs `deployments`|cannot be read)"):
        check(tmp_path / "prefect.yaml")
