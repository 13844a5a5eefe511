"""The checker, losses inside the region, replicas that differ, and memory."""

import functools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.parallel import run, text
from dphybrid.parallel import DataParallel, Devices, LossInside, split_sizes
from dphybrid.parallel.check import check_module
from dphybrid.parallel.memory import activation_bytes, block_memory, memory_text
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


class Caching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.cache = x
        return x


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape) + torch.zeros_like(x).uniform_()


class DrawsFromPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class DecidesByChance(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(1) < 0.5 else -x


class FixedDevice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(3, device="cuda:0")


class Unflattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    ("make", "breaks", "words"),
    [
        (Unregistered, True, ["self.table", "register_buffer"]),
        (Stored, True, ["self.function", "bound method"]),
        (ListedModules, True, ["self.parts", "nn.ModuleList"]),
        (Caching, False, ["self.cache", "test_check.py:"]),
        (Draws, False, ["torch.randn", "uniform_", "the number of devices"]),
        (DrawsFromPython, False, ["random.random", "the number of devices"]),
        (DecidesByChance, False, ["decides by chance", "each replica by itself"]),
        (lambda: nn.SyncBatchNorm(3), True, ["processes"]),
        (FixedDevice, True, ["'cuda:0'", "x.device", "test_check.py:"]),
        (Unflattened, False, ["flatten_parameters", "test_check.py:"]),
        (lambda: nn.LSTM(3, 3), True, ["batch_first=True"]),
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


def test_the_loss_inside_weighs_every_sample_alike() -> None:
    torch.manual_seed(0)
    block = nn.Linear(5, 3).double()
    x, labels = torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 3, (30,))
    expected = nn.functional.cross_entropy(block(x), labels)
    for devices in (1, 2, 8):
        region = DataParallel(LossInside(block, nn.CrossEntropyLoss(reduction="none")), f"cpu*{devices}")
        loss_B = region(x, labels)
        assert loss_B.shape == (30,)
        torch.testing.assert_close(loss_B.mean(), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="reduction"):
        DataParallel(LossInside(block, nn.CrossEntropyLoss()), "cpu*2")(x, labels)


def test_activation_estimate_counts_what_autograd_keeps() -> None:
    # A linear layer keeps its input, the ReLU its output; the last output counts too. Parameters do not.
    module = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    kept = activation_bytes(module, (torch.empty(8, 10),), {})
    assert kept == 8 * (10 + 20 + 5) * 4
    sizes = split_sizes(20, 3)
    devices = block_memory(module, (torch.empty(7, 10),), {}, sizes, ["a", "b", "c"], "adam")
    parameters = sum(p.numel() for p in module.parameters()) * 4
    assert [d.parameters for d in devices] == [parameters] * 3
    assert [d.optimizer for d in devices] == [2 * parameters, 0, 0]
    assert [d.rows for d in devices] == [7, 7, 6]
    assert devices[2].activations == 6 * (10 + 20 + 5) * 4
    assert "activations" in memory_text(devices)


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
