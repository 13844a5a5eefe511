"""A request to stop before training begins ends the run once its model is built or its checkpoint loaded."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dphybrid.cli.parser import run_cli
from dphybrid.config.settings import load_settings
from dphybrid.gpus import devices as leasing
from dphybrid.gpus.leases import ask_for, find_holder
from dphybrid.recipes.configs import build_config
from dphybrid.run import job, trainer
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals, watching
from tests.fake_nvml import gpu, write_state
from tests.gpus.test_devices import machine  # noqa: F401 - a fixture
from tests.waiting import wait_until

CONFIG = build_config({"recipe": "hybrid", "devices": "auto*1", "train": {"batch_size": 640}}).model_dump()
FIRST_GPU = gpu(0)["uuid"]


def run(epochs: int, stop: StopRequest, resume: str | None = None) -> job.Report:
    config = build_config(CONFIG | {"train": CONFIG["train"] | {"epochs": epochs}})
    return job.run_job(config, load_settings(), run_name="run", resume=resume, stop=stop)


def ask(who: str) -> None:
    """Ask the run that holds the first GPU to stop."""
    if who == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        settings = load_settings()
        ask_for(settings.lease_dir, leasing.Inventory(settings.nvml).read()[0])


@pytest.mark.parametrize(
    ("who", "when"), [("devices --ask", "build_trained"), ("SIGTERM", "load_checkpoint")]
)
def test_a_request_before_the_first_step_ends_the_run(
    who: str,
    when: str,
    machine: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "none")
    checkpoints = tmp_path / "data" / "runs" / "run" / "checkpoints"
    loading = when == "load_checkpoint"
    where = trainer if loading else job
    if loading:
        run(1, StopRequest())
    before = sorted(checkpoints.glob("*"))
    stop, done = StopRequest(), getattr(trainer, when)

    def ask_meanwhile(*args: Any, **more: Any) -> Any:
        result = done(*args, **more)
        ask(who)
        wait_until(lambda: stop.pending, "the request was heard", 30, 0.01)
        return result

    monkeypatch.setattr(where, when, ask_meanwhile)
    with pytest.raises(Interrupted, match="stopped by ") as caught:
        run(3, stop, "run" if loading else None)
    assert caught.value.run == "run"
    assert caught.value.requeue == (who == "devices --ask")
    assert caught.value.signal_number == (signal.SIGTERM if who == "SIGTERM" else None)
    assert sorted(checkpoints.glob("*")) == before
    assert find_holder(tmp_path / "leases", FIRST_GPU) is None
    monkeypatch.setattr(where, when, done)
    assert run(3, StopRequest(), "run").run_name == "run"


def test_a_request_ends_the_preparation_and_the_waiting_for_gpus(
    machine: Path,  # noqa: F811
    stranger: int,
    unrecorded: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, prepare = StopRequest(), job.prepare_data

    def prepare_and(ask: Callable[[], None]) -> None:
        monkeypatch.setattr(job, "prepare_data", lambda *args, **named: (prepare(*args, **named), ask())[0])

    prepare_and(lambda: stop.ask("a test"))
    with pytest.raises(Interrupted, match="a test before it was built") as caught:
        run(1, stop)
    assert caught.value.run is None
    prepare_and(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted, match="Ctrl-C"):  # at once
        run(1, StopRequest())
    write_state(machine, [gpu(0, processes=[[stranger, 38]])])
    stop, told = StopRequest(), []

    def waits(reason: str) -> None:
        told.append(reason)
        stop.ask("a test")

    config = build_config(CONFIG)
    with (
        pytest.raises(Interrupted),
        leasing.leased_devices(config, load_settings(), run="run", on_wait=waits, stop=stop),
    ):
        pass
    assert len(told) == 1


def test_a_second_signal_interrupts_and_any_ends_what_gives_way() -> None:
    stop = StopRequest()
    stop.ask("its owner", requeue=True)
    with stop_signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        stop.obey()
    assert (caught.value.signal_number, caught.value.requeue) == (signal.SIGTERM, False)


@pytest.mark.parametrize("run", ["night", None])
def test_a_run_that_gave_way_ends_with_75_and_its_remedy(
    run: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def gives_way() -> int:
        interruption = Interrupted("stopped by its owner", requeue=True)
        interruption.run = run
        raise interruption

    assert run_cli(gives_way) == 75
    told = capsys.readouterr().err
    assert ("Continue with `dphybrid train --resume night`" in told) == (run is not None)


def test_a_look_that_fails_is_told_once_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    seen, left = threading.Event(), [OSError("first"), OSError("second")]

    def look() -> bool:
        if left:
            raise left.pop(0)
        seen.set()
        return True

    with watching(look, 0.01, "watch"):
        assert seen.wait(30)
    told = capsys.readouterr().err
    assert told.count("watch failed, and tries again every 0.01 s") == 1
    assert "OSError: first" in told
    assert "second" not in told


def test_it_ends_with_its_block() -> None:
    with pytest.raises(ValueError, match="inside"), watching(lambda: False, 0.01, "watch-that-ends"):
        raise ValueError("inside")
    assert not [thread for thread in threading.enumerate() if thread.name == "watch-that-ends"]
