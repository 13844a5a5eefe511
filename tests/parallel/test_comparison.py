"""The comparison of a batch unsplit with itself split names the module that computes across the batch."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.parallel import DataParallel, compare_split, refuse_split_differences
from dphybrid.util.errors import UserError
from tests.parallel import zoo


class Head(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x)))


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.layer(x), dim=1)
        return F.cross_entropy(z @ z.t(), torch.arange(len(x), device=x.device), reduction="none")


class BatchSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


ACROSS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.softmax(0),
    lambda x: (x - x.mean(0)) / x.std(0),
    lambda x: x.sort(0).values,
    lambda x: x.cumsum(0),
    lambda x: x.flip(0),
    lambda x: x + torch.arange(len(x))[:, None],
    lambda x: torch.zeros_like(x).index_add_(0, torch.arange(len(x)) % 2, x),
]


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize(
    ("make", "module", "what"),
    [
        *((partial(Head, function), "1", "its input to 1.after") for function in ACROSS),
        (Contrastive, "1", "its output"),
        (BatchSecond, "1.attention", "its output"),
        (partial(nn.Softmax, 0), "1", "its output"),
    ],
)
def test_the_module_that_computes_across_the_batch_is_named(
    devices: str, make: Callable[[], nn.Module], module: str, what: str
) -> None:
    torch.manual_seed(0)
    region = DataParallel(nn.Sequential(nn.Linear(6, 6), make()), devices)
    model = nn.ModuleDict({"region": region})
    model.forward = lambda x: model["region"](x)  # type: ignore[method-assign]
    found = compare_split(model, torch.randn(7, 6))
    assert [(one.module, one.place) for one in found] == [(f"region.{module}", what)]
    assert f"BREAKS  region.{module} [{what}]: differs by" in found[0].text()


@pytest.mark.parametrize("make", zoo.SHAPES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_modules_that_treat_each_sample_alone_agree(make: Callable[[], nn.Module], devices: str) -> None:
    torch.manual_seed(0)
    region = DataParallel(nn.Sequential(make(), nn.Dropout(0.5)), devices)
    state = {key: value.clone() for key, value in region.state_dict().items()}
    random_state = torch.get_rng_state()
    assert (
        compare_split(region, torch.randn(11, *zoo.SHAPES[make], generator=torch.Generator().manual_seed(1)))
        == []
    )
    assert region.training
    assert region.module[1].training
    assert torch.equal(torch.get_rng_state(), random_state)
    for key, value in region.state_dict().items():
        assert torch.equal(value, state[key])


def test_the_comparison_leaves_no_split_on_record_and_stops_when_asked() -> None:
    region = DataParallel(nn.Softmax(0), "cpu*2")
    assert len(compare_split(region, torch.randn(5, 3))) == 1
    assert region.splits() == []
    told = "the model computes something else when the first batch is split:\nBREAKS .*its output.: differs"
    with pytest.raises(UserError, match=told):
        refuse_split_differences(region, torch.randn(5, 3))
    refuse_split_differences(DataParallel(nn.Softmax(1), "cpu*2"), torch.randn(5, 3))
