"""Training on leased GPUs, and giving them back: the whole job in processes of its own, on stand-in GPUs."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import load_settings
from dphybrid.gpus import devices as leasing
from dphybrid.gpus import leases
from dphybrid.gpus.devices import expected_devices, leased_devices, reason_to_yield
from dphybrid.gpus.leases import ask_for, find_holder
from dphybrid.recipes.configs import build_config
from tests.commands import command
from tests.fake_nvml import gpu, stand_in, write_state
from tests.refusing import refused
from tests.waiting import patience, wait_until


@pytest.fixture
def machine(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three free stand-in GPUs for this process and those it starts; returns the file that describes them."""
    monkeypatch.setattr(leases, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(leasing, "LOOK_EVERY_S", 0.05)
    return stand_in(monkeypatch, tmp_path, 3, GPU_WAIT_S=60)


def config(devices: str) -> ExperimentConfig:
    return build_config({"recipe": "hybrid", "devices": devices})


def test_device_texts_become_leases_and_what_torch_calls_them(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings()
    for wanted, text, number in (
        ("auto", "cpu*3", 3),
        ("auto*2", "cpu*2", 2),
        ("cuda:1", "cpu", 1),
        ("cuda:1*4", "cpu*4", 1),
        ("cpu*5", "cpu*5", 0),
    ):
        assert expected_devices(config(wanted), settings) == text
        with leased_devices(config(wanted), settings, run="test") as devices:
            assert devices.text == text
            assert len(devices.lease.gpus if devices.lease else ()) == number
    with leased_devices(config("auto"), settings, run="resumed", replicas=2) as devices:
        assert devices.text == "cpu*2"
    at_most_two = settings.model_copy(update={"max_gpus": 2})
    with leased_devices(config("auto"), at_most_two, run="resumed", replicas=3) as devices:
        assert devices.text == expected_devices(config("auto"), at_most_two) == "cpu*2"
    assert "this run had 3 devices, and may take 2 GPUs here" in capsys.readouterr().out
    for wanted, wrong in (("cuda:7", "cuda:7 does not exist"), ("auto*5", "5 GPUs wanted, 3 visible")):
        with refused(wrong), leased_devices(config(wanted), settings, run="test"):
            pass
        with refused(wrong):
            expected_devices(config(wanted), settings)
    write_state(machine, [gpu(0)], init_error="DRIVER_NOT_LOADED")
    with leased_devices(config("auto"), settings, run="test") as devices:
        assert (devices.text, devices.lease) == ("cpu", None)


def test_runs_give_way_on_request_and_when_training_hours_end(machine: Path) -> None:
    noon, settings = datetime.fromisoformat("2026-11-24 12:00"), load_settings()
    hours = settings.model_copy(update={"training_hours": "20:00-08:00"})
    with leased_devices(config("auto*2"), settings, run="night") as devices:
        lease = devices.lease
        assert reason_to_yield(lease, settings, noon) is None
        ended = "the end of training hours (training hours begin at 20:00)"
        assert reason_to_yield(lease, hours, noon) == ended
        assert reason_to_yield(lease, hours, noon.replace(hour=23)) is None
        ask_for(settings.lease_dir, lease.gpus[1])
        assert "asked for GPU 1" in str(reason_to_yield(lease, settings, noon))


class Driver:
    """Stands in for CUDA, which reads CUDA_VISIBLE_DEVICES once: when started, or asked if it is there."""

    def __init__(self, uuids: list[str]) -> None:
        self.uuids, self.seen, self.started = uuids, None, False
        self.workspace: str | None = None

    def look(self) -> int:
        if self.seen is None:
            names = os.environ.get("CUDA_VISIBLE_DEVICES")
            named = self.uuids if names is None else names.split(",")
            self.seen = [uuid for uuid in named if uuid in self.uuids]
        return len(self.seen)

    def init(self) -> None:
        self.workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        self.look()
        self.started = True

    def device_count(self) -> int:
        names = os.environ.get("CUDA_VISIBLE_DEVICES")  # NVML's answer, until CUDA has started
        return self.look() if self.started else len(self.uuids if names is None else names.split(","))

    def get_device_properties(self, number: int) -> SimpleNamespace:
        assert self.started
        return SimpleNamespace(uuid=self.seen[number].removeprefix("GPU-"))


@pytest.fixture
def driver(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver([gpu(number)["uuid"] for number in range(3)])
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(leasing, "REAL_NVML", "tests.fake_nvml")
    for name in ("init", "device_count", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(driver, name))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: driver.started)
    return driver


@pytest.mark.parametrize(
    ("before", "text"), [("nothing", "cuda:0"), ("looked", "cuda:2"), ("started", "cuda:2")]
)
def test_a_lease_is_the_gpu_that_cuda_computes_on(before: str, text: str, driver: Driver) -> None:
    if before != "nothing":
        driver.look()
    driver.started = before == "started"
    with leased_devices(config("cuda:2"), load_settings(), run="test") as devices:
        assert devices.text == text
        (leased,) = devices.lease.gpus
        assert driver.get_device_properties(int(text[-1])).uuid == leased.uuid.removeprefix("GPU-")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    if before != "started":  # by the lease, then; there is no second chance
        assert driver.workspace == ":4096:2"


def test_a_gpu_that_cuda_does_not_see_is_not_replaced_by_another(driver: Driver) -> None:
    driver.seen = driver.uuids[:2]  # CUDA was asked for when only these were to be seen
    with (
        refused("GPU 2: CUDA was started in this process without it"),
        leased_devices(config("cuda:2"), load_settings(), run="test"),
    ):
        pass
    assert find_holder(load_settings().lease_dir, driver.uuids[2]) is None
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def words(folder: Path, name: str, epochs: int) -> list[str]:
    """A command that trains."""
    rows = folder / "clicks.csv"
    if not rows.exists():
        lines = (f"{i % 3 == 0:d},s{i % 7},{i % 50}" for i in range(600))
        rows.write_text("\n".join(["clicked,site,age", *lines]))
    text = "train --tracking none --recipe ctr --devices auto*2 --data.label clicked --model.dropout 0.1"
    text += f" --train.patience 0 --train.log-every 5 --train.batch-size 32 --train.epochs {epochs}"
    return [*text.split(), "--run-name", name, "--data.path", str(rows)]


def train(folder: Path, name: str, epochs: int, log: Path) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", "dphybrid", *words(folder, name, epochs)]
    with log.open("wb") as stream:
        return subprocess.Popen(argv, stdout=stream, stderr=stream, env=os.environ)


@pytest.mark.nightly
def test_a_run_that_gave_way_goes_on_with_the_same_bits(machine: Path, tmp_path: Path) -> None:
    free, folder = [gpu(number) for number in range(2)], tmp_path / "leases"
    write_state(machine, free)
    command(*words(tmp_path, "undisturbed", 10))
    log = tmp_path / "polite.log"
    polite = train(tmp_path, "polite", 10, log)
    wait_until(lambda: b"epoch 2/10" in log.read_bytes(), "it trains")
    command("devices", "--ask", "1")
    assert polite.wait(patience(120)) == os.EX_TEMPFAIL, log.read_text()
    assert "Continue with `dphybrid train --resume polite`" in log.read_text()
    assert [find_holder(folder, unit["uuid"]) for unit in free] == [None, None]
    command("train", "--tracking", "none", "--resume", "polite")
    runs = tmp_path / "data/runs"
    one, other = (json.loads((runs / name / "report.json").read_text()) for name in ("undisturbed", "polite"))
    assert one["digests"] == other["digests"]
    assert one["metrics"] == other["metrics"]
    assert other["devices"] == "cpu*2"
