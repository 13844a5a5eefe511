"""What torch's own tests of DataParallel ask and no other test here, on two virtual devices: each comes to
what the bare module gives."""

import copy
import gc
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.parallel import DataParallel, data_parallel, gather, replicate, scatter
from tests.parallel.zoo import MODES, Running

TWO = "cpu*2"
CASES: dict[str, Callable[[], None]] = {}
GRADCHECKS = (torch.autograd.gradcheck, torch.autograd.gradgradcheck)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


@case
def an_lstm_that_flattens_its_weights() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(5, 7, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            self.rnn.flatten_parameters()
            out: Tensor = self.rnn(x)[0]
            return out

    bare = Recurrent().double()
    region = DataParallel(copy.deepcopy(bare), TWO)
    x = torch.ones(4, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        region(x)
    for module in (bare, region):
        optimizer = torch.optim.SGD(module.parameters(), lr=10.0)
        module(x).square().mean().backward()
        optimizer.step()
    for one, two in zip(bare.parameters(), region.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@case
def no_reference_cycles() -> None:
    gc.collect()
    region = DataParallel(nn.Sequential(nn.Linear(1, 1)), TWO)
    region(torch.randn(2, 1))
    gc.collect()
    region(torch.randn(2, 1))
    assert gc.collect() == 0


@case
def sparse_gradients_of_an_embedding() -> None:
    module, ids = nn.Embedding(10, 5, sparse=True), torch.randint(10, (20, 5))
    module(ids).sum().backward()
    expected = module.weight.grad
    module.weight.grad = None
    data_parallel(module, ids, TWO).sum().backward()
    assert module.weight.grad.is_sparse
    assert torch.equal(module.weight.grad.to_dense(), expected.to_dense())


class Named(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, data: dict[str, Any]) -> Tensor:
        out: Tensor = self.layer(data["data"])
        return out


@case
def every_floating_type_and_keywords_with_empty_containers() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        module, x = nn.Linear(10, 5).to(dtype), torch.randn(20, 10).to(dtype)
        tolerance = {"rtol": 0.0, "atol": 1e-2 if dtype.itemsize == 2 else 1e-5}
        torch.testing.assert_close(DataParallel(module, TWO)(x), module(x), **tolerance)
        region = DataParallel(Named(module), TWO)
        for more in ({}, {"unused": []}, {"unused": {}}, {"unused": ()}):
            torch.testing.assert_close(region(data={"data": x, **more}), module(x), **tolerance)


@case
def a_gradient_penalty() -> None:
    module, x = nn.Linear(4, 1), torch.ones(2, 4, requires_grad=True)
    region = DataParallel(module, TWO)
    out = region(x)
    (grads,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    grads.mean().backward()
    assert torch.equal(module.weight.grad, torch.full((1, 4), 0.25))
    assert module.bias.grad is None or torch.equal(module.bias.grad, torch.zeros(1))


@case
def scatter_and_its_second_derivatives() -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    one, two = scatter(x, TWO)
    assert torch.equal(one, x[:2])
    assert torch.equal(two, x[2:])
    one.backward(torch.full_like(one, 2.0))
    assert torch.equal(x.grad, torch.tensor([2.0, 2, 0, 0], dtype=torch.float64)[:, None].expand(4, 4))
    assert all(check(lambda y: tuple(scatter(y, TWO)), (x,)) for check in GRADCHECKS)


@case
def gather_and_its_second_derivatives() -> None:
    inputs = tuple(torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.equal(gather(inputs, -1), torch.cat(inputs))
    assert all(check(lambda x, y: gather((x, y), -1), inputs) for check in GRADCHECKS)


@case
def autocast_in_the_forward() -> None:
    class Cast(nn.Linear):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    for mode in MODES:
        out = Running(Cast(8, 8), TWO, mode)(torch.randn(8, 8))
        assert out.dtype == torch.bfloat16


@case
def replicas_can_be_saved() -> None:
    for detach in (False, True):
        torch.save(replicate(nn.Linear(8, 8), TWO, detach), io.BytesIO())


@case
def gradients_keep_the_layout_of_their_parameters() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        bare = nn.Sequential(nn.Conv2d(4, 6, 2), nn.Conv2d(6, 4, 2)).to(memory_format=layout)
        region = DataParallel(copy.deepcopy(bare), TWO)
        x = torch.randn(6, 4, 5, 5)
        for module, _ in itertools.product((bare, region), range(2)):
            F.mse_loss(module(x), torch.zeros(6, 4, 3, 3)).backward()
        for one, two in zip(bare, region.module, strict=True):
            assert two.weight.grad.is_contiguous(memory_format=layout)
            torch.testing.assert_close(one.weight.grad, two.weight.grad, rtol=1e-4, atol=1e-6)


@case
def lists_and_dicts_of_parameters() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ones = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
            self.named = nn.ParameterDict(
                {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3))}
            )

        def forward(self, x: Tensor) -> Tensor:
            held = [*self.ones, *self.named.values()]
            assert len(self.ones) == len(self.named) == 2
            return x * torch.stack(held).sum(0)

    held = Held()
    out = DataParallel(held, TWO)(torch.ones(4, 3))
    assert torch.equal(out, torch.full((4, 3), 4.0))
    out.sum().backward()
    assert all(torch.equal(p.grad, torch.full((3,), 4.0)) for p in held.parameters())


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    CASES[name]()
