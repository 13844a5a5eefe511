"""What torch's own tests of DataParallel ask and no other test here, on two virtual devices: each comes to
what the bare module gives."""

import copy
import gc
import io
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from dphybrid.parallel import DataParallel, data_parallel, replicate

TWO = "cpu*2"


def test_no_reference_cycles() -> None:
    gc.collect()
    region = DataParallel(nn.Sequential(nn.Linear(1, 1)), TWO)
    region(torch.randn(2, 1))
    gc.collect()
    region(torch.randn(2, 1))
    assert gc.collect() == 0


def test_sparse_gradients_of_an_embedding() -> None:
    module, ids = nn.Embedding(10, 5, sparse=True), torch.randint(10, (20, 5))
    module(ids).sum().backward()
    expected = module.weight.grad
    module.weight.grad = None
    data_parallel(module, ids, TWO).sum().backward()
    assert module.weight.grad.is_sparse
    assert torch.equal(module.weight.grad.to_dense(), expected.to_dense())


def test_every_floating_type() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        module, x = nn.Linear(10, 5).to(dtype), torch.randn(20, 10).to(dtype)
        tolerance = {"rtol": 0.0, "atol": 1e-2 if dtype.itemsize == 2 else 1e-5}
        torch.testing.assert_close(DataParallel(module, TWO)(x), module(x), **tolerance)


def test_replicas_can_be_saved() -> None:
    for detach in (False, True):
        torch.save(replicate(nn.Linear(8, 8), TWO, detach), io.BytesIO())


def test_gradients_keep_the_layout_of_their_parameters() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        bare = nn.Sequential(nn.Conv2d(4, 6, 2), nn.Conv2d(6, 4, 2)).to(memory_format=layout)
        region = DataParallel(copy.deepcopy(bare), TWO)
        x = torch.randn(6, 4, 5, 5)
        for module, _ in itertools.product((bare, region), range(2)):
            F.mse_loss(module(x), torch.zeros(6, 4, 3, 3)).backward()
        for one, two in zip(bare, region.module, strict=True):
            assert two.weight.grad.is_contiguous(memory_format=layout)
            torch.testing.assert_close(one.weight.grad, two.weight.grad, rtol=1e-4, atol=1e-6)
