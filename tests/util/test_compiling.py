"""Optimizers that leave torch.compile unimported."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from dphybrid.util.compiling import eager
from tests.commands import python

RUN = """
import sys
from dphybrid.cli.main import main

assert main(["train", "--recipe", "hybrid", "--train.epochs", "1", "--devices", "cpu*2"]) == 0
compiler, plots = ["torch._dynamo", "torch._inductor"], ["matplotlib"]
ranks = ["torchrec", "fbgemm_gpu", "tensordict", "dphybrid.cluster.sharding"]
print("imported:", [name for name in [*compiler, *plots, *ranks] if name in sys.modules])
"""


def test_a_run_imports_no_compiler_plots_or_ranks(data_dir: Path) -> None:
    variables = {**os.environ, "DPHYBRID_TRACKING_URI": "none"}
    done = python("-c", RUN, env=variables, timeout=300)
    assert done.stdout.splitlines()[-1] == "imported: []"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_steps_hooks_and_states_are_torchs(kind: type[torch.optim.Optimizer]) -> None:
    def trained(made: type[torch.optim.Optimizer]) -> list[object]:
        torch.manual_seed(0)
        model, told = nn.Linear(3, 2), []
        optimizer = made(model.parameters(), lr=0.1, weight_decay=0.1)  # type: ignore[call-arg]
        optimizer.register_step_post_hook(lambda *_: told.append("step"))
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step(lambda: model(torch.ones(4, 3)).square().sum().backward())  # type: ignore[arg-type]
        again = made(model.parameters(), lr=0.5)  # type: ignore[call-arg]
        again.load_state_dict(optimizer.state_dict())
        state = [value for states in again.state_dict()["state"].values() for value in states.values()]
        weights = [p.tolist() for p in model.parameters()]
        return [*told, again.param_groups[0]["lr"], *weights, *map(str, state)]

    assert trained(eager(kind)) == trained(kind)
