"""What a run with a large table takes at most: the table, its row states and 1 GB for everything else; and,
where memory has room for it, a copy of what a checkpoint writes beside the training."""

import json
import os
from pathlib import Path

import pytest

from tests.commands import python

MODEL = """
import torch
from torch import nn
from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import DataParallel

DIM = 64

class Large(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.table = HostEmbedding(ROWS, DIM, seed=context.seed)
        self.region = DataParallel(nn.Linear(DIM, context.info["shapes"]["y_BO"][0]), context.devices)

    def table_ids(self, batch):
        return {"table": (batch["x_BI"].sum(1).abs() * 1e9).long() % ROWS}

    def forward(self, batch):
        loss_B = (self.region(self.table(self.table_ids(batch)["table"])) - batch["y_BO"]).square().mean(1)
        return {"loss": loss_B, "weight": torch.ones_like(loss_B)}
"""

RUN = """
import json
import flows.train_hybrid, mlflow  # what a flow's process has loaded
from dphybrid.recipes.configs import load_config
from dphybrid.run.job import run_job
from dphybrid.config.settings import load_settings
from dphybrid.training import saving

if SHORT:
    saving.available_memory_bytes = lambda: 0
overrides = ["recipe=toy", "model.factory=large:Large", "table.optimizer=adagrad", "train.patience=0"]
for epochs in (1, 2):  # the second goes on from the first one's checkpoint
    config = load_config(None, [*overrides, f"train.epochs={epochs}"])
    resume = "large" if epochs > 1 else None
    run_job(config, load_settings(), run_name="large", resume=resume)
lines = open("/proc/self/status").read().splitlines()
print(json.dumps({line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("VmHWM")}))
"""


def peak_bytes(folder: Path, rows: int, short: bool) -> int:
    """Train, save, load and go on with a table of `rows` rows of 64 float32 in a process of its own; return
    the most memory it had. short: memory has no room for copies."""
    (folder / "large.py").write_text(MODEL.replace("ROWS", str(rows)), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder), "DPHYBRID_DATA_DIR": str(folder / "data")}
    done = python("-c", RUN.replace("SHORT", str(short)), env=environment)
    return int(json.loads(done.stdout.splitlines()[-1])["VmHWM"]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.nightly
def test_a_run_takes_its_table_its_states_and_a_gigabyte(tmp_path: Path, short: bool) -> None:
    rows = 2_000_000
    table_and_state = rows * 64 * 4 + rows * 4
    copies = 0 if short else table_and_state
    assert table_and_state < peak_bytes(tmp_path, rows, short) < table_and_state + copies + 10**9
