"""One rule of the queue for GPUs, whoever asks; no file of another account and no hung driver stops it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dphybrid.config.settings import Settings
from dphybrid.gpus import leases, waiting
from dphybrid.gpus.inventory import Inventory, busy_reason
from dphybrid.gpus.leases import find_holder, make_locked, try_lease
from dphybrid.gpus.waiting import Turns, Wanted, acquire, free_now
from dphybrid.orchestration import worker
from dphybrid.util.alive import process_name
from dphybrid.util.limited import Limited
from tests.fake_nvml import gpu, stand_in, write_state


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two free GPUs; returns the file that describes them."""
    return stand_in(monkeypatch, tmp_path, 2)


def soon(folder: Path, **more: Any) -> Settings:
    return Settings(**{"lease_dir": folder, "gpu_window_s": 0, "gpu_poll_s": 0.01, "gpu_wait_s": 0} | more)


def takes(fake: Inventory, folder: Path) -> int:
    """Return how many GPUs a run that comes now can lease, one by one."""
    with ExitStack() as held:
        for count in range(3):
            try:
                held.enter_context(
                    acquire(Wanted(count=1), fake, soon(folder), run="late", on_wait=lambda _: None)
                )
            except leases.UserError:
                return count
    return count


@pytest.mark.parametrize("busy", [(), (0,), (0, 1)])
@pytest.mark.parametrize("leased", [(), (1,)])
@pytest.mark.parametrize(
    "tickets", [[], [((0,), 1)], [((1,), 1)], [((0, 1), 1)], [((0, 1), 2)], [((0,), 1), ((0, 1), 1)]]
)
def test_a_worker_and_a_run_that_waits_find_the_same_gpus_free(
    busy: tuple[int, ...],
    leased: tuple[int, ...],
    tickets: list[tuple[tuple[int, ...], int]],
    machine: Path,
    fake: Inventory,
    folder: Path,
    stranger: int,
) -> None:
    units = fake.read()
    write_state(machine, [gpu(n, processes=[[stranger, 1]] if n in busy else []) for n in range(2)])
    with ExitStack() as held:
        if leased:
            held.enter_context(try_lease(folder, [units[n] for n in leased], "mine"))
        for numbers, least in tickets:
            held.enter_context(waiting._ticket(folder, [units[n] for n in numbers], least))
        found, pids = free_now(fake, soon(folder)) or (0, set())
        assert found == takes(fake, folder)
        assert pids == ({os.getpid()} if leased or tickets else set())


def test_a_run_that_waits_for_an_occupied_gpu_keeps_nobody_from_the_other(
    machine: Path,
    fake: Inventory,
    folder: Path,
    stranger: int,
) -> None:
    write_state(machine, [gpu(0, processes=[[stranger, 70]]), gpu(1)])
    with waiting._ticket(folder, fake.read()[:1], 1):
        assert (free_now(fake, soon(folder)) or (0,))[0] == 1
        assert takes(fake, folder) == 1


LOCKS = """
import fcntl, os, sys, time
handles = [os.open(name, os.O_RDONLY) for name in sys.argv[2:]]
for handle in handles:
    fcntl.flock(handle, fcntl.LOCK_SH)
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def hostile() -> Iterator[Callable[..., None]]:
    """A function that lets another process hold files locked."""
    with ExitStack() as held:

        def lock(*files: Path) -> None:
            argv = [sys.executable, "-c", LOCKS, "", *map(str, files)]
            child = held.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE))
            held.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline() == b"locked\n"

        yield lock


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("0-abc.ticket", {"uuids": "ALL", "least": 1}),
        ("evil.ticket", {"uuids": [], "least": 1}),
        ("00000000000000000001-1.ticket", {"uuids": "ALL", "least": 1000000}),
        ("00000000000000000001-1.ticket", {"uuids": "ALL", "least": 2, "process": "gone"}),
        ("gpu-ALL.00000000000000000001-1.lock", {"pid": 1, "process": "gone", "run": "x"}),
    ],
)
def test_what_others_lock_in_the_folder_stops_nobody(
    name: str, page: dict[str, Any], fake: Inventory, folder: Path, hostile: Callable[..., None]
) -> None:
    uuids = [unit.uuid for unit in fake.read()]
    with subprocess.Popen(["sleep", "60"]) as gone:
        dead = process_name(gone.pid)
        gone.kill()
    page = page | ({"uuids": uuids} if page.get("uuids") == "ALL" else {})
    page |= {"process": dead} if "process" in page else {}
    files = [folder / name.replace("ALL", uuid) for uuid in (uuids if "ALL" in name else uuids[:1])]
    for file in files:
        file.write_text(json.dumps(page))
    hostile(*files)
    assert free_now(fake, soon(folder)) == (2, set())
    assert find_holder(folder, uuids[0]) is None
    assert takes(fake, folder) == 2


@pytest.mark.parametrize("run", ["", "x" * 5000, "a\n\x1b[2Jb"])
def test_a_run_of_any_name_waits_and_leases(run: str, fake: Inventory, folder: Path) -> None:
    with waiting._ticket(folder, fake.read(), 2, run):
        assert free_now(fake, soon(folder)) == (0, {os.getpid()})
    with try_lease(folder, fake.read(), run):
        holder = find_holder(folder, fake.read()[0].uuid)
        assert holder is not None
        assert holder.text().isprintable()


def test_nobody_can_lock_a_file_before_its_maker(
    fake: Inventory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()
    real = leases.lock

    def lock(handle: int, wait: bool = False) -> bool:
        seen.append(os.fstat(handle).st_mode & 0o777)
        return real(handle, wait)

    monkeypatch.setattr(leases, "lock", lock)
    os.close(make_locked(folder / "a", leases.Holder()))
    assert seen == [0o600]
    assert (folder / "a").stat().st_mode & 0o777 == 0o644


def test_a_ticket_that_does_not_take_its_turn_loses_it_and_is_named(
    fake: Inventory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    units, told, turns = fake.read(), list[str](), Turns()
    page = waiting._Ticket(pid=1, process=process_name(), run="idle", uuids={u.uuid for u in units}, least=2)
    handle = make_locked(folder / "00000000000000000001-1.ticket", page)
    try:
        assert free_now(fake, soon(folder), turns) == (0, {1})
        settings = soon(folder, gpu_poll_s=5, gpu_wait_s=600)
        with acquire(Wanted(count=1), fake, settings, run="late", on_wait=told.append):
            assert 60 < now < 90
        assert "GPU 0: next is " in told[0]
        assert "run idle since " in told[0]
        assert free_now(fake, soon(folder), turns) == (2, {1})
    finally:
        os.close(handle)


def test_one_reading_that_fails_ends_no_wait(fake: Inventory, folder: Path) -> None:
    free = fake.read()
    busy = tuple(unit.__class__(**{**unit.__dict__, "free_bytes": 0}) for unit in free)
    readings = iter([busy, busy, (), busy[:1], free, free])
    told = list[str]()
    flaky: Any = SimpleNamespace(read=lambda: next(readings))
    with acquire(Wanted(count=2), flaky, soon(folder, gpu_wait_s=60), run="a", on_wait=told.append) as lease:
        assert len(lease.gpus) == 2
    assert busy_reason(busy[0], soon(folder)) in told[0]
    assert "GPU 0: NVML does not list it now; GPU 1: NVML does not list it now" in told


def test_a_call_that_hangs_is_left_behind_and_not_begun_again() -> None:
    begun, go_on = list[int](), threading.Event()

    def hang() -> int:
        begun.append(1)
        go_on.wait()
        return 7

    limited = Limited(hang, 0.05)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            limited()
    assert len(begun) == 1
    go_on.set()
    time.sleep(0.05)
    assert limited() == 7
    with pytest.raises(ZeroDivisionError):
        Limited(lambda: 1 // 0, 5)()


def test_a_worker_whose_nvml_hangs_goes_on_and_says_so(
    machine: Path,
    folder: Path,
    fake: Inventory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, go_on = worker.DrainingWorker(work_pool_name="gpu", name="one"), threading.Event()
    monkeypatch.setattr(worker.DrainingWorker, "num_running", property(lambda _: 0))
    one.inventory, turned = fake, list[int]()

    async def rooms() -> list[int | None]:
        async def turning() -> None:
            while True:
                await asyncio.sleep(0.01)
                turned.append(1)

        beside = asyncio.create_task(turning())
        found = [await asyncio.to_thread(one._room, soon(folder)) for _ in range(3)]
        beside.cancel()
        return found

    assert asyncio.run(rooms()) == [2, 2, 2]
    monkeypatch.setattr("tests.fake_nvml.nvmlDeviceGetCount", go_on.wait)
    monkeypatch.setattr(fake, "_limited", Limited(fake._read, 0.3))
    turned.clear()
    assert asyncio.run(rooms()) == [0, 0, 0]
    assert len(turned) > 10
    assert caplog.text.count("has not answered for") == 1
    go_on.set()
