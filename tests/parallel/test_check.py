"""The checker of modules."""

from collections.abc import Callable

import pytest
from torch import nn

from dphybrid.parallel import DataParallel
from dphybrid.parallel.replication import check_module
from tests.parallel import zoo


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.SyncBatchNorm(3), ["the module (SyncBatchNorm)", "processes"]),
        (lambda: nn.Sequential(nn.LSTM(3, 3)), ["0 (LSTM)", "batch_first=True"]),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), ["self_attn", "batch_first=True"]),
        (zoo.mlp_batchnorm, ["1 (BatchNorm1d)", "GroupNorm"]),
        (lambda: nn.InstanceNorm1d(3, track_running_stats=True), ["track_running_stats=False"]),
        (lambda: DataParallel(nn.Linear(2, 2), "cpu*2"), ["is data-parallel itself"]),
        (lambda: nn.LazyLinear(3), ["without a size"]),
    ],
)
def test_the_checker_names_place_and_remedy(make: Callable[[], nn.Module], words: list[str]) -> None:
    (found,) = check_module(make())
    for word in words:
        assert word in found


@pytest.mark.parametrize(
    "make", [m for m in zoo.SHAPES if m is not zoo.mlp_batchnorm], ids=lambda f: f.__name__
)
def test_the_checker_raises_no_false_alarm(make: Callable[[], nn.Module]) -> None:
    assert check_module(make()) == []
