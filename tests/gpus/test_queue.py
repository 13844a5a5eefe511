"""One rule of the queue for GPUs, whoever asks; no hung driver stops it."""

import asyncio
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dphybrid.config.settings import Settings
from dphybrid.gpus.inventory import Inventory, busy_reason
from dphybrid.gpus.leases import Wanted, acquire, find_holder, free_now, try_lease
from dphybrid.orchestration import worker
from dphybrid.util.errors import UserError
from dphybrid.util.limited import Limited
from tests.fake_nvml import gpu, stand_in, write_state
from tests.gpus.conftest import waits


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two free GPUs; returns the file that describes them."""
    return stand_in(monkeypatch, tmp_path, 2)


def soon(folder: Path, **more: Any) -> Settings:
    return Settings(**{"lease_dir": folder, "gpu_wait_s": 0} | more)


def takes(fake: Inventory, folder: Path) -> int:
    """Return how many GPUs a run that comes now can lease, one by one."""
    with ExitStack() as held:
        for count in range(3):
            try:
                wanted = Wanted(fake.read(), least=1, most=1)
                held.enter_context(acquire(wanted, fake, soon(folder), run="late", on_wait=lambda _: None))
            except UserError:
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
            held.enter_context(waits(folder, fake, numbers, least))
        found, pids = free_now(fake, soon(folder)) or (0, set())
        assert found == takes(fake, folder)
        assert pids == ({os.getpid()} if leased or tickets else set())


@pytest.mark.parametrize("run", ["", "x" * 5000, "a\n\x1b[2Jb"])
def test_a_run_of_any_name_waits_and_leases(run: str, fake: Inventory, folder: Path) -> None:
    with waits(folder, fake, range(2), 2, run):
        assert free_now(fake, soon(folder)) == (0, {os.getpid()})
    with try_lease(folder, fake.read(), run):
        holder = find_holder(folder, fake.read()[0].uuid)
        assert holder is not None
        assert holder.text().isprintable()


def test_one_reading_that_fails_ends_no_wait(fake: Inventory, folder: Path) -> None:
    free = fake.read()
    busy = tuple(unit.__class__(**{**unit.__dict__, "free_bytes": 0}) for unit in free)
    readings = iter([busy, (), busy[:1], free, free])
    told, wanted = list[str](), Wanted(free, least=2, most=2)
    flaky: Any = SimpleNamespace(read=lambda: next(readings), reason="NVML: Unknown Error")
    with acquire(wanted, flaky, soon(folder, gpu_wait_s=60), run="a", on_wait=told.append) as lease:
        assert len(lease.gpus) == 2
    assert busy_reason(busy[0], soon(folder)) in told[0]
    assert "NVML: Unknown Error" in told


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
    assert caplog.text.count("has not answered for 20 s; see `nvidia-smi`; runs that need a GPU stay") == 1
    go_on.set()
