"""The checker of modules."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.parallel import run, text
from dphybrid.parallel import DataParallel, Devices
from dphybrid.parallel.check import check_module
from dphybrid.training.memory import own_gpus
from tests.parallel import zoo


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = self.helper

    def helper(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class ListedModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(3, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x)


@pytest.mark.parametrize(
    ("make", "breaks", "words"),
    [
        (Unregistered, True, ["self.table", "register_buffer"]),
        (Stored, True, ["self.function", "bound method"]),
        (ListedModules, True, ["self.parts", "nn.ModuleList"]),
        (lambda: nn.SyncBatchNorm(3), True, ["processes"]),
        (lambda: nn.LSTM(3, 3), True, ["batch_first=True"]),
        (lambda: nn.Dropout(), False, ["masks differ", "dphybrid.parallel.Dropout"]),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), True, ["self_attn", "batch_first=True"]),
        (zoo.mlp_batchnorm, False, ["BatchNorm1d", "GroupNorm"]),
        (zoo.tied, False, ["table", "output", "HostEmbedding"]),
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
    "make", [m for m in zoo.SHAPES if m not in (zoo.mlp_batchnorm, zoo.tied)], ids=lambda f: f.__name__
)
def test_the_checker_raises_no_false_alarm(make: Callable[[], nn.Module]) -> None:
    assert check_module(make()) == []


def test_a_partial_or_lambda_over_a_module_is_found() -> None:
    module = nn.Module()
    other = nn.Linear(2, 2)
    module.function = functools.partial(other.forward)
    module.other = lambda x: other(x)
    assert len(check_module(module)) == 2


def test_only_the_models_own_gpus_are_asked_for_their_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2), region := DataParallel(nn.Linear(2, 2), "cpu*2"))
    assert own_gpus(model) == []
    region.devices = Devices("cuda:3,cuda:1", (torch.device("cuda:3"), torch.device("cuda:1")), virtual=False)
    assert own_gpus(model) == [1, 3]


def test_the_benchmark_measures_every_way() -> None:
    result = run(repeats=2)
    assert [row["what"] for row in result["rows"]][:3] == [
        "plain call",
        "nn.DataParallel, no GPU",
        "dphybrid, cpu",
    ]
    assert all(row["step_us"] > 0 for row in result["rows"])
    assert "dphybrid, cpu*8" in text(result)
