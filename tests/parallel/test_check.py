"""The checker of modules."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.parallel import run, text
from dphybrid.parallel import DataParallel, Devices
from dphybrid.parallel.check import check_module
from dphybrid.training.memory import own_gpus
from tests.parallel import zoo


def holding(value: object) -> nn.Module:
    module = nn.Module()
    module.held = value
    return module


def calls(layer: nn.Module) -> Callable[[Any], Any]:
    return lambda x: layer(x)


@pytest.mark.parametrize(
    ("make", "breaks", "words"),
    [
        (lambda: holding({"table": torch.ones(3)}), True, ["self.held", "register_buffer"]),
        (lambda: holding(types.SimpleNamespace(table=torch.ones(3))), True, ["self.held", "register_buffer"]),
        (lambda: holding(nn.Linear(3, 3).forward), True, ["self.held", "bound method"]),
        (lambda: holding(partial(nn.Linear(3, 3).forward)), True, ["self.held", "bound method"]),
        (
            lambda: holding([(lambda layer: lambda x: layer(x))(nn.ReLU())]),
            True,
            ["self.held", "stored function"],
        ),
        (lambda: holding([nn.TransformerEncoderLayer(4, 2)]), True, ["self.held", "nn.ModuleList"]),
        (lambda: nn.SyncBatchNorm(3), True, ["processes"]),
        (lambda: nn.LSTM(3, 3), True, ["batch_first=True"]),
        (lambda: nn.Dropout(), False, ["masks differ", "dphybrid.parallel.Dropout"]),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), True, ["self_attn", "batch_first=True"]),
        (zoo.mlp_batchnorm, False, ["BatchNorm1d", "GroupNorm"]),
        (zoo.Tied, False, ["table", "output", "HostEmbedding"]),
        (lambda: DataParallel(nn.Linear(2, 2), "cpu*2"), True, ["is data-parallel itself"]),
        (lambda: nn.LazyLinear(3), True, ["without a size"]),
    ],
)
def test_the_checker_names_place_and_remedy(
    make: Callable[[], nn.Module], breaks: bool, words: list[str]
) -> None:
    found = check_module(make())
    assert any(finding.breaks == breaks for finding in found)
    shown = "\n".join(finding.text() for finding in found)
    for word in words:
        assert word in shown


@pytest.mark.parametrize(
    "make", [m for m in zoo.SHAPES if m not in (zoo.mlp_batchnorm, zoo.Tied)], ids=lambda f: f.__name__
)
def test_the_checker_raises_no_false_alarm(make: Callable[[], nn.Module]) -> None:
    assert check_module(make()) == []


def test_only_the_models_own_gpus_are_asked_for_their_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2), region := DataParallel(nn.Linear(2, 2), "cpu*2"))
    assert own_gpus(model) == []
    region.devices = Devices("cuda:3,cuda:1", (torch.device("cuda:3"), torch.device("cuda:1")), virtual=False)
    assert own_gpus(model) == [1, 3]


@pytest.mark.nightly
def test_the_benchmark_measures_every_way() -> None:
    result = run(repeats=2)
    assert [row["what"] for row in result["rows"]][:3] == [
        "plain call",
        "nn.DataParallel, no GPU",
        "dphybrid, cpu",
    ]
    assert all(row["step_us"] > 0 for row in result["rows"])
    assert "dphybrid, cpu*8" in text(result)
