"""Shared by the tests of several ranks: a table of clicks, runs built but not trained, ranks."""

import importlib.util
import io
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from dphybrid.cluster.launch import rank_environment, run_ranks
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.experiment import Experiment
from dphybrid.run.job import build_run, prepare_data
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest
from tests.conftest import REPOSITORY

needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="needs dphybrid[cluster]"
)
LIMIT_S = 200
BASE = [
    "recipe=ctr",
    "devices=cpu",
    "train.epochs=3",
    "train.batch_size=50",
    "train.patience=0",
    "checkpoint.full_every=1",
    "train.lr=0.01",
    "table.optimizer=adagrad",
    "table.lr=0.1",
]
SMALL = ["model.dim=8", "model.hidden=16", "model.dropout=0", "data.label=clicked"]


def write_clicks(path: Path, rows: int = 630) -> Path:
    """Write a table with numbers, categories and a bag; the label depends on all of them."""
    random = np.random.default_rng(7)
    lines = ["price,site,ad,genres,clicked"]
    for _ in range(rows):
        price, site, ad = random.normal(), int(random.zipf(1.6)) % 60, int(random.integers(40))
        bag = random.choice(
            ["drama", "comedy", "news", "sport"], size=int(random.integers(1, 4)), replace=False
        )
        chance = 1 / (1 + np.exp(-(price + (site % 3) - (ad % 2) + ("news" in bag) - 1)))
        lines.append(f"{price:.4f},s{site},a{ad},{'|'.join(bag)},{int(random.random() < chance)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings_in(folder: Path) -> Settings:
    return load_settings().model_copy(update={"data_dir": folder, "tracking_uri": "none", "threads": 1})


def built(settings: Settings, name: str, values: list[str], resume: str | None = None) -> str:
    """Prepare the clicks in the data folder and build a run, without training it; return its folder."""
    clicks = settings.data_dir / "clicks.csv"
    if not clicks.exists():
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        write_clicks(clicks)
    config = load_config(None, [*BASE, *SMALL, f"data.path={clicks}", *values])
    resumed = Experiment.continuing(resume, config, settings) if resume else None
    experiment = replace(resumed or prepare_data(config, settings), devices=config.devices)
    with build_run(experiment, run_name=name) as begun:
        return str(begun.run.folder)


def train_on_ranks(settings: Settings, ranks: int, folders: list[str]) -> None:
    """Train built runs one after the other, with this number of ranks."""
    environment = rank_environment(settings.model_dump(mode="json"))
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *sys.path[:1]])
    deadline = time.monotonic() + LIMIT_S

    def look() -> None:
        if time.monotonic() > deadline:
            raise UserError(f"the ranks took more than {LIMIT_S} s")

    program, said = ("tests.cluster.several", *folders), io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = run_ranks(ranks, program, Path(folders[0]), environment, 0, StopRequest(), look)
    if code:
        raise UserError(said.getvalue()[-8000:])


def tensors_of(folder: str, number: int = -1) -> dict[str, Tensor]:
    """Return "FILE:NAME" -> tensor for all tensors of a run's checkpoint. number: -1 is the newest one."""
    checkpoint = sorted((Path(folder) / "checkpoints").glob("step-*"))[number]
    return {
        f"{file.relative_to(checkpoint)}:{name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
