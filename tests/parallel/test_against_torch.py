"""A split batch against the same module unsplit, and against shares that are computed one after another by
hand, as torch.nn.DataParallel computes them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.parallel import DataParallel
from tests.parallel.zoo import MODES, SHAPES, Running, mlp_batchnorm, spectral_norm


@pytest.mark.parametrize("make", SHAPES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("devices", [2, 3, 5, 8])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_that_of_a_copy_a_share_whose_first_keeps_its_buffers(
    make: Callable[[], nn.Module], devices: int, mode: str
) -> None:
    """Batch statistics are those of each share; the first one's go into the module."""
    torch.manual_seed(0)
    split = make().double()
    x = torch.randn(16, *SHAPES[make], dtype=torch.float64)
    copies = [copy.deepcopy(split) for _ in x.chunk(devices)]
    wanted = torch.cat([one(share) for one, share in zip(copies, x.chunk(devices), strict=True)])
    wanted.square().sum().backward()
    found = Running(split, f"cpu*{devices}", mode)(x)
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    for name, parameter in split.named_parameters():
        summed = sum(one.get_parameter(name).grad for one in copies)  # type: ignore[misc]
        torch.testing.assert_close(parameter.grad, summed, rtol=1e-12, atol=1e-12, msg=name)
    for name, buffer in split.named_buffers():
        assert torch.equal(buffer, copies[0].get_buffer(name)), name


@pytest.mark.parametrize(
    "make", [m for m in SHAPES if m not in (mlp_batchnorm, spectral_norm)], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("mode", MODES)
def test_networks_without_batch_state_equal_themselves_unsplit(
    make: Callable[[], nn.Module], devices: int, mode: str
) -> None:
    torch.manual_seed(1)
    module = make().double()
    region = Running(module, f"cpu*{devices}", mode)
    for rows in (1, 2, 7, 11, 33):
        x = torch.randn(rows, *SHAPES[make], dtype=torch.float64, requires_grad=True)
        found = []
        for each in (region, module):
            y = each(x)
            grads = torch.autograd.grad(y.sin().sum(), [x, *module.parameters()], allow_unused=True)
            found.append([y, *grads])
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


class Keyword(nn.Module):
    """Takes a tensor by keyword, one by position, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor, *, scale: Tensor, flag: bool | None = None) -> dict[str, Any]:
        y = self.layer(x) * scale
        return {"y": -y if flag else y, "pair": (y.sum(1), None)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("flag", [{}, {"flag": True}])
def test_a_call_with_keywords_equals_the_modules_own(devices: int, flag: dict[str, bool], mode: str) -> None:
    module = Keyword()
    for rows in (16, 10):  # with 10 rows and a flag, torch's own calls three of eight replicas without x
        x, scale = torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 1, dtype=torch.float64)
        ours = Running(module, f"cpu*{devices}", mode)(x, scale=scale, **flag)
        torch.testing.assert_close(ours, module(x, scale=scale, **flag), rtol=1e-12, atol=1e-12)


def test_integer_weights_give_the_same_bits() -> None:
    module = nn.Linear(6, 4).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape))
    x = torch.randint(-4, 5, (33, 6)).double()
    for devices in (1, 2, 3, 5, 8):
        module.zero_grad()
        y = DataParallel(module, f"cpu*{devices}")(x)
        assert torch.equal(y, module(x))
        y.sum().backward()
        assert torch.equal(module.weight.grad, x.sum(0).expand(4, 6))


def test_gradients_of_gradients() -> None:
    wrapped = DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), "cpu*3")
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = wrapped.module[0].weight

    def call(x: Tensor, _: Tensor) -> Tensor:
        return wrapped(x)  # the checks change the weight in place and ask for its gradient

    assert torch.autograd.gradcheck(call, (x, weight))
    assert torch.autograd.gradgradcheck(call, (x, weight))
