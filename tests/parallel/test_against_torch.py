"""A split batch against the same module unsplit, and against shares that are computed one after another by
hand, as torch.nn.DataParallel computes them."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dphybrid.parallel import DataParallel, data_parallel
from tests.parallel.zoo import MODES, SHAPES, Running
from tests.shifting import shifted


@pytest.mark.parametrize("make", SHAPES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_that_of_a_copy_for_each_share(make: Callable[[], nn.Module], mode: str) -> None:
    """Batch statistics are those of each share; the first one's go into the module."""
    torch.manual_seed(0)
    devices = 3
    split = make().double()
    x = torch.randn(16, *SHAPES[make], dtype=torch.float64)
    copies = [copy.deepcopy(split) for _ in x.chunk(devices)]
    # The shares of a split lie elsewhere in memory than these.
    shares = [shifted(share, 8) for share in x.chunk(devices)]
    wanted = torch.cat([one(share) for one, share in zip(copies, shares, strict=True)])
    wanted.square().sum().backward()
    found = Running(split, f"cpu*{devices}", mode)(x)
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    for name, parameter in split.named_parameters():
        summed = sum(one.get_parameter(name).grad for one in copies)  # type: ignore[misc]
        torch.testing.assert_close(parameter.grad, summed, rtol=1e-12, atol=1e-12, msg=name)
    for name, buffer in split.named_buffers():
        assert torch.equal(buffer, copies[0].get_buffer(name)), name


def test_gradients_of_gradients() -> None:
    wrapped = DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), "cpu*3")
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = wrapped.module[0].weight

    def call(x: Tensor, _: Tensor) -> Tensor:
        return wrapped(x)  # the checks change the weight in place and ask for its gradient

    assert torch.autograd.gradcheck(call, (x, weight))
    assert torch.autograd.gradgradcheck(call, (x, weight))


def test_no_reference_cycle_keeps_a_tensor_or_a_replica() -> None:
    region = DataParallel(nn.Sequential(nn.Linear(1, 1)), "cpu*2")
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        region(torch.randn(2, 1))
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, Tensor | nn.Module)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_sparse_gradients_of_an_embedding() -> None:
    module, ids = nn.Embedding(10, 5, sparse=True), torch.randint(10, (20, 5))
    module(ids).sum().backward()
    expected = module.weight.grad
    module.weight.grad = None
    data_parallel(module, ids, "cpu*2").sum().backward()
    assert module.weight.grad.is_sparse
    assert torch.equal(module.weight.grad.to_dense(), expected.to_dense())
