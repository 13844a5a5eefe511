"""Ranks that a run starts itself, or torchrun by hand: deaths, requests to stop, one record for all."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from dphybrid.config.settings import Settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.pages import Report, ResultPage
from dphybrid.run.train import run_job
from dphybrid.util.stop import Interrupted, StopRequest
from tests.cluster.launching import (
    BASE,
    CAN_JOIN,
    LIMIT_S,
    SMALL,
    Machine,
    joined_machines,
    needs_torchrec,
    settings_in,
    write_clicks,
)
from tests.conftest import REPOSITORY
from tests.postgres import free_port
from tests.refusing import refused
from tests.waiting import patience

pytestmark = [needs_torchrec, pytest.mark.slow]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(REPOSITORY)
    for name in ("MORTAL_STEP", "MORTAL_AGENT", "MORTAL_SIGNAL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    write_clicks(tmp_path / "clicks.csv")
    return settings_in(tmp_path / "data")


def values(tmp_path: Path, *more: str) -> list[str]:
    own = ["model.factory=tests.cluster.mortal:build", "checkpoint.every_steps=3", "train.log_every=5"]
    return [*BASE, *SMALL, "model.dropout=0.2", f"data.path={tmp_path / 'clicks.csv'}", *own, *more]


def train(
    settings: Settings, tmp_path: Path, name: str, *more: str, stop: StopRequest | None = None
) -> Report:
    config = load_config(None, values(tmp_path, "cluster.ranks=2", *more))
    return run_job(config, settings, run_name=name, stop=stop)


def test_a_request_to_stop_ends_all_ranks_with_a_checkpoint(settings: Settings, tmp_path: Path) -> None:
    stop = StopRequest()

    def ask() -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and not list(
            settings.runs_dir.glob("asked/checkpoints/step-000003")
        ):
            time.sleep(0.05)
        stop.ask("a test")

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(Interrupted, match="stopped by a test after step") as caught:
        train(settings, tmp_path, "asked", "train.epochs=200", stop=stop)
    asking.join()
    assert caught.value.run == "asked"
    done = run_job(load_config(None, values(tmp_path, "train.epochs=4")), settings, resume="asked")
    assert done.run_name == "asked"


def test_what_the_ranks_refuse_is_told_once_and_not_tried_again(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with refused(r"step \d: the loss is nan.*no finite numbers"):
        train(settings, tmp_path, "nan", "table.lr=1e38", "train.lr=1e38", "train.clip_norm=0")
    assert "Going on from" not in capfd.readouterr().out


@pytest.mark.skipif("DPHYBRID_LONG_TESTS" not in os.environ, reason="takes a minute: DPHYBRID_LONG_TESTS=1")
def test_a_rank_that_stands_still_is_ended_after_the_limit(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MORTAL_STEP", "7")
    monkeypatch.setenv("MORTAL_SIGNAL", "SIGSTOP")
    limited = settings.model_copy(update={"cluster_timeout_s": 10.0})
    report = train(limited, tmp_path, "still")
    assert report.metrics["auc"] > 0
    assert "Going on from" in capfd.readouterr().out


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two machines where root may make them; else twice this one."""
    with joined_machines() if CAN_JOIN else nullcontext([Machine("127.0.0.1", "lo")] * 2) as both:
        yield both


def test_two_machines_by_hand_one_of_which_is_away_for_a_while(
    settings: Settings, tmp_path: Path, machines: list[Machine]
) -> None:
    """Each has an agent and a data folder of its own; the second dies and returns."""
    port, flags = free_port(), []
    for text in values(tmp_path, "cluster.ranks=2"):
        name, _, value = text.partition("=")
        flags += [f"--{name.replace('_', '-')}", value]

    def agent(number: int, said: Path, **more: str) -> "subprocess.Popen[bytes]":
        here = machines[number]
        own = {
            "DPHYBRID_DATA_DIR": str(tmp_path / f"machine-{number}"),
            "DPHYBRID_TRACKING_URI": "none",
            "DPHYBRID_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": here.interface,
            "OMP_NUM_THREADS": "1",
        }
        torchrun = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "by-hand"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:{port}"]
        torchrun += ["--rdzv-conf", f"is_host={str(number == 0).lower()}", "--local-addr", here.address]
        return subprocess.Popen(
            [
                *here.within,
                sys.executable,
                "-m",
                "torch.distributed.run",
                *torchrun,
                "-m",
                "dphybrid",
                "train",
                *flags,
            ],
            env={**os.environ, **own, **more},
            stdout=said.open("wb"),
            stderr=subprocess.STDOUT,
        )

    said = [tmp_path / f"said-{number}" for number in range(3)]
    agents = [agent(0, said[0]), agent(1, said[1], MORTAL_STEP="7", MORTAL_AGENT="1")]
    try:
        assert agents[1].wait(patience(LIMIT_S)) == -9
        agents.append(agent(1, said[2]))
        ends = [process.wait(timeout=patience(LIMIT_S)) for process in (agents[0], agents[2])]
        assert ends == [0, 0], said[0].read_text()[-5000:]
    finally:
        for process in agents:
            process.kill()
    (run,) = (tmp_path / "machine-0/runs").glob("*")
    assert not (tmp_path / "machine-1/runs").exists()
    assert "Going on from" in said[0].read_text()
    assert ResultPage.read(run / "result.json").epochs == 3
