"""GPUs, when they are free, leases and their queue, through a stand-in for NVML."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dphybrid.cli.main import main
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus import leases
from dphybrid.gpus.devices import leased_devices
from dphybrid.gpus.inventory import Inventory, busy_reason, visible
from dphybrid.gpus.leases import Wanted, asked_by, find_holder, free_now, try_lease
from dphybrid.recipes.configs import build_config
from dphybrid.util.errors import UserError
from dphybrid.util.hours import parse_training_hours
from tests.commands import command
from tests.conftest import REPOSITORY
from tests.fake_nvml import gpu, stand_in, write_state
from tests.gpus.conftest import waits
from tests.refusing import refused
from tests.waiting import patience, wait_until

NORMAL = Settings()


def acquire(
    fake: Inventory, folder: Path, least: int = 1, most: int = 4, on_wait: Any = print, **more: Any
) -> Any:
    """Lease some of the visible GPUs that are free now, or with more settings."""
    settings = Settings(**{"gpu_wait_s": 0, "lease_dir": folder} | more)
    wanted = Wanted(tuple(visible(fake.read())), least, most)
    return leases.acquire(wanted, fake, settings, run="a run", on_wait=on_wait)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four free GPUs; returns the file that describes them."""
    return stand_in(monkeypatch, tmp_path, 4)


def test_gpus_have_memory_load_processes_and_owners(machine: Path, fake: Inventory, stranger: int) -> None:
    write_state(machine, [gpu(0, free_gib=42, load=70, processes=[[stranger, 38]]), gpu(1)])
    first, second = fake.read()
    assert (first.label, first.utilisation, first.free_bytes) == ("GPU 0", 70, 42 * 2**30)
    (process,) = first.processes
    assert process.command == "sleep"
    assert abs(process.since.timestamp() - time.time()) < 60
    assert busy_reason(first, NORMAL).startswith(f"GPU 0: 38.0 GiB taken by {process.owner} since ")
    assert busy_reason(second, NORMAL) is None


@pytest.mark.parametrize("name", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "NO_PERMISSION"])
def test_a_driver_that_does_not_work_is_broken_not_missing(name: str, machine: Path, fake: Inventory) -> None:
    write_state(machine, [gpu(0)], init_error=name)
    assert fake.read() == ()
    assert fake.reason.startswith("NVML: ")
    assert fake.broken == (name != "LIBRARY_NOT_FOUND")
    write_state(machine, [gpu(0)])
    assert len(fake.read()) == 1  # the driver came back


def test_what_nvml_does_not_tell_and_gpus_that_fail(machine: Path, fake: Inventory) -> None:
    odd = [gpu(0, hides=["load", "processes"]), gpu(1, error="GPU_IS_LOST")]
    write_state(machine, [*odd, gpu(2, processes=[[os.getpid(), None]])])
    hidden, lost, own = fake.read()
    assert hidden.utilisation is None
    assert busy_reason(hidden, NORMAL) is None
    assert "lost" in str(busy_reason(lost, NORMAL)).lower()
    assert busy_reason(own, NORMAL) is None


def test_memory_of_unseen_processes_and_load_make_a_gpu_busy(machine: Path, fake: Inventory) -> None:
    write_state(machine, [gpu(0, free_gib=60), gpu(1, load=50), gpu(2, processes=[[2**22 + 1, 1]])])
    unseen, loaded, other_container = fake.read()
    assert "20.0 of 80.0 GiB" in str(busy_reason(unseen, NORMAL))
    assert "50 % load" in str(busy_reason(loaded, NORMAL))
    assert "somebody" in str(busy_reason(other_container, NORMAL))


def test_cuda_visible_devices_chooses_orders_and_stops_at_the_first_unknown_name(
    fake: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = fake.read()

    def chosen(names: str) -> list[int]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        return [unit.index for unit in visible(units)]

    assert visible(units) == list(units)
    assert chosen("") == []
    assert chosen("2,0") == [2, 0]
    assert chosen("1,-1,2") == [1]
    assert chosen("0,9,1") == [0]
    assert chosen("GPU-00000003") == [3]
    assert chosen("GPU-0") == []  # matches several


def test_gpus_that_mig_splits_are_not_used_and_say_why(machine: Path, fake: Inventory, folder: Path) -> None:
    write_state(machine, [gpu(0, mig=True), gpu(1)])
    assert [unit.label for unit in fake.read()] == ["GPU 0", "GPU 1"]
    with acquire(fake, folder) as whole:
        assert [unit.uuid for unit in whole.gpus] == [gpu(1)["uuid"]]
    with refused("GPU 0: is split by MIG"):
        acquire(fake, folder, least=2)


def test_a_lease_keeps_others_out_and_says_who_holds_it(fake: Inventory, folder: Path) -> None:
    units = fake.read()
    with try_lease(folder, units[:2], "mine") as lease:
        assert try_lease(folder, units[1:3], "yours") is None
        holder = find_holder(folder, units[0].uuid)
        assert (holder.run, holder.pid) == ("mine", os.getpid())
        assert find_holder(folder, units[2].uuid) is None  # a refused lease leaves nothing locked
        with refused("run mine since"):
            acquire(fake, folder, least=4)
        assert len(lease.gpus) == 2
    assert find_holder(folder, units[0].uuid) is None


def test_a_forked_child_does_not_keep_a_gpu(fake: Inventory, folder: Path) -> None:
    lease = try_lease(folder, fake.read()[:1], "parent")
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        time.sleep(0.1)
        lease.release()
        assert find_holder(folder, lease.gpus[0].uuid) is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_takes_the_free_gpus_that_it_needs(
    machine: Path, fake: Inventory, folder: Path, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(machine, [gpu(0), gpu(1, processes=[[stranger, 1]]), gpu(2), gpu(3)])
    with acquire(fake, folder) as lease:
        assert [unit.index for unit in lease.gpus] == [0, 2, 3]
    with acquire(fake, folder, most=2) as lease:
        assert [unit.index for unit in lease.gpus] == [0, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    with acquire(fake, folder, most=1) as lease:
        assert [unit.index for unit in lease.gpus] == [3]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    told: list[str] = []
    with refused("4 GPUs did not come free .* GPU 1: 1.0 GiB taken by "):
        acquire(fake, folder, 4, 4, told.append, gpu_wait_s=0.1)
    assert len(told) == 1
    assert not list(folder.glob("*.ticket"))


def test_outside_the_hours_nothing_starts_and_no_ticket_is_held(
    fake: Inventory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is patience used up. A run waits for a leased GPU when the hours end."""
    now, tickets, told = 0.0, list[int](), list[str]()
    other = try_lease(folder, fake.read()[:1], "other")

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 600 * seconds  # a look each ten minutes

    def closed_reason(_: datetime) -> str | None:
        tickets.append(len(list(folder.glob("*.ticket"))))
        if now:
            other.release()
        return "closed until Monday" if 0 < now < 200_000 else None

    clock = SimpleNamespace(monotonic=lambda: now, monotonic_ns=time.monotonic_ns, sleep=sleep)
    monkeypatch.setattr(leases, "time", clock)
    hours = SimpleNamespace(closed_reason=closed_reason)
    monkeypatch.setattr(leases, "parse_training_hours", lambda _: hours)
    monkeypatch.setattr(leases, "LOOK_EVERY_S", 1.0)
    acquire(fake, folder, 4, on_wait=told.append, gpu_wait_s=86400).release()
    assert told[1:] == ["closed until Monday"]
    assert tickets[:3] == [0, 1, 0]
    assert now > 200_000


def test_a_worker_counts_the_gpus_that_nobody_uses_or_waits_for(
    machine: Path, fake: Inventory, folder: Path, stranger: int
) -> None:
    settings = Settings(lease_dir=folder)
    write_state(machine, [gpu(0), gpu(1, processes=[[stranger, 1]]), gpu(2), gpu(3)])
    assert free_now(fake, settings) == (3, set())
    with try_lease(folder, fake.read()[:1], "mine"), waits(folder, fake, range(4), 4):
        # one of the four is occupied, nobody knows how long
        assert free_now(fake, settings) == (2, {os.getpid()})
    hour = datetime.now().hour
    later = f"{(hour + 2) % 24}:00-{(hour + 3) % 24}:00"
    assert free_now(fake, Settings(lease_dir=folder, training_hours=later)) == (0, set())
    write_state(machine, [])
    assert free_now(fake, settings) is None


def test_training_hours_go_past_midnight_and_know_weekends() -> None:
    hours = parse_training_hours("mon-fri 19:00-07:30, sat, sun")
    for moment, allowed in (
        ("2026-11-20 18:59", False),
        ("2026-11-20 19:00", True),
        ("2026-11-21 12:00", True),
        ("2026-11-23 07:29", False),
        ("2026-11-24 07:29", True),  # Tuesday morning belongs to Monday's span
    ):
        assert hours.open_at(datetime.fromisoformat(moment)) is allowed, moment
    assert hours.closed_reason(datetime.fromisoformat("2026-11-24 08:00")) == "training hours begin at 19:00"
    assert parse_training_hours("").open_at(datetime.fromisoformat("2026-11-24 08:00"))
    for wrong in ("8-20", "25:00-08:00", "foo 20:00-08:00", "20:00"):
        with refused("training hours"):
            parse_training_hours(wrong)


def test_devices_shows_a_table_and_asks_a_run_to_give_way(
    machine: Path, folder: Path, fake: Inventory, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(machine, [gpu(0, processes=[[stranger, 38]], free_gib=41), gpu(1), gpu(2)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("COLUMNS", "160")

    def devices(*argv: str) -> str:
        return command("devices", *argv)

    with try_lease(folder, fake.read()[1:2], "night") as lease:
        first, second, hidden = devices().splitlines()[1:]
        assert first.startswith("cuda:1")
        assert "38.0 GiB taken by" in first
        assert second.startswith("cuda:0")
        assert "run night since" in second
        assert hidden.startswith("hidden")
        assert asked_by(lease) is None
        assert "asked to give way" in devices("--ask", "0")
        assert "asked for GPU 1" in str(asked_by(lease))
    assert "is not leased, so there is no run to ask" in devices("--ask", "0")
    with try_lease(folder, fake.read()[1:2], "a[v2] [/] :smile:"):
        assert "run a[v2] [/] :smile: since" in devices()


@pytest.fixture
def two(machine: Path) -> Path:
    """Two free GPUs."""
    write_state(machine, [gpu(0), gpu(1)])
    return machine


def takes(fake: Inventory, folder: Path) -> int:
    """Return how many GPUs a run that comes now can lease, one by one."""
    with ExitStack() as held:
        for count in range(3):
            try:
                held.enter_context(acquire(fake, folder, most=1, on_wait=lambda _: None))
            except UserError:
                return count
    return count


@pytest.mark.parametrize(("busy", "leased"), [((), ()), ((0,), ()), ((), (1,)), ((0,), (1,))])
@pytest.mark.parametrize(
    "tickets", [[], [((0,), 1)], [((1,), 1)], [((0, 1), 1)], [((0, 1), 2)], [((0,), 1), ((0, 1), 1)]]
)
def test_a_worker_and_a_run_that_waits_find_the_same_gpus_free(
    busy: tuple[int, ...],
    leased: tuple[int, ...],
    tickets: list[tuple[tuple[int, ...], int]],
    two: Path,
    fake: Inventory,
    folder: Path,
    stranger: int,
) -> None:
    units = fake.read()
    write_state(two, [gpu(n, processes=[[stranger, 1]] if n in busy else []) for n in range(2)])
    with ExitStack() as held:
        if leased:
            held.enter_context(try_lease(folder, [units[n] for n in leased], "mine"))
        for numbers, least in tickets:
            held.enter_context(waits(folder, fake, numbers, least))
        found, pids = free_now(fake, Settings(lease_dir=folder)) or (0, set())
        assert found == takes(fake, folder)
        assert pids == ({os.getpid()} if leased or tickets else set())


def test_one_reading_that_fails_ends_no_wait(two: Path, fake: Inventory, folder: Path) -> None:
    free = fake.read()
    busy = tuple(unit.__class__(**{**unit.__dict__, "free_bytes": 0}) for unit in free)
    readings = iter([busy, (), busy[:1], free, free])
    told, wanted = list[str](), Wanted(free, least=2, most=2)
    flaky: Any = SimpleNamespace(read=lambda: next(readings), reason="NVML: Unknown Error")
    settings = Settings(lease_dir=folder, gpu_wait_s=60)
    with leases.acquire(wanted, flaky, settings, run="a", on_wait=told.append) as lease:
        assert len(lease.gpus) == 2
    assert busy_reason(busy[0], settings) in told[0]
    assert "NVML: Unknown Error" in told


RUN = """
import json, os, sys, time
from pathlib import Path
from dphybrid.config.settings import Settings
from dphybrid.gpus import leases
from dphybrid.gpus.inventory import Inventory
leases.LOOK_EVERY_S = 0.03
folder, count, hold_s, log = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
def note(what, lease):
    gpus = [gpu.index for gpu in lease.gpus]
    line = json.dumps({"pid": os.getpid(), "what": what, "gpus": gpus, "at": time.monotonic()}) + "\\n"
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, line.encode())
    os.close(handle)
settings = Settings(lease_dir=folder, gpu_wait_s=90)
fake, run = Inventory("tests.fake_nvml"), f"run{os.getpid()}"
wanted = leases.Wanted(fake.read(), count, count)
with leases.acquire(wanted, fake, settings, run=run, on_wait=print) as lease:
    note("took", lease)
    time.sleep(hold_s)
    note("gave", lease)
"""


def start(folder: Path, count: int, hold_s: float, log: Path) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-c", RUN, str(folder), str(count), str(hold_s), str(log)]
    return subprocess.Popen(argv, cwd=REPOSITORY)


def read_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_kill_9_frees_gpus_and_large_runs_are_not_overtaken(
    machine: Path, folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    first = start(folder, 3, 600, log)
    wait_until(lambda: len(read_log(log)) == 1, "one run has begun", every_s=0.02)
    large = start(folder, 4, 0.2, log)
    wait_until(lambda: len(list(folder.glob("*.ticket"))) == 1, "the large run waits", every_s=0.02)
    small = start(folder, 1, 0.2, log)  # GPU 3 is free, but the earlier run needs it, too
    wait_until(lambda: len(list(folder.glob("*.ticket"))) == 2, "both runs wait", every_s=0.02)
    killed = time.monotonic()
    first.kill()
    first.wait()
    assert (large.wait(patience(60)), small.wait(patience(60))) == (0, 0)
    _, took_large, _, took_small, _ = read_log(log)
    assert took_large["gpus"] == [0, 1, 2, 3]
    assert took_small["at"] > took_large["at"] > killed


def test_gpus_that_torch_cannot_use_are_said_by_all_commands_alike(
    machine: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dphybrid.cli.doctor.find_spec", lambda _: None)  # Prefect takes seconds
    monkeypatch.setenv("DPHYBRID_NVML", "tests.fake_nvml")
    monkeypatch.setenv("DPHYBRID_LEASE_DIR", str(data_dir.parent / "leases"))
    for module in ("dphybrid.gpus.inventory", "dphybrid.gpus.devices"):
        monkeypatch.setattr(f"{module}.REAL_NVML", "tests.fake_nvml")  # no stand-in for NVML, as it were

    def told_by(command: str) -> str:
        main([command])
        return capsys.readouterr().out

    def leased(devices: str) -> str:
        config = build_config({"recipe": "toy", "devices": devices})
        with leased_devices(config, load_settings(), run="x") as found:
            return found.text

    monkeypatch.setattr(torch.version, "cuda", None)
    why = "NVML lists 4 GPUs, and torch .* is a build without CUDA; install one with CUDA"
    assert leased("auto") == "cpu"
    assert re.search(f"Note: trains on the CPU: {why}", capsys.readouterr().out)
    assert re.search(f"Note: torch cannot use the GPUs, devices=auto means cpu: {why}", told_by("devices"))
    assert re.search(f"BAD  GPUs: {why}; devices=auto takes the CPU; remedy", told_by("doctor"))
    with refused(f"devices=cuda:0: {why}"):
        leased("cuda:0")

    write_state(machine, [gpu(0)], init_error="LIB_RM_VERSION_MISMATCH")
    assert leased("auto") == "cpu"
    assert "Note: trains on the CPU: NVML: RM has detected an NVML" in capsys.readouterr().out
    assert "BAD  GPUs: NVML: RM has detected an NVML" in told_by("doctor")
    write_state(machine, [gpu(0), gpu(1, error="GPU_IS_LOST")])
    assert re.search(r"BAD  GPU 1: GPU is lost; `nvidia-smi`", told_by("doctor"))
