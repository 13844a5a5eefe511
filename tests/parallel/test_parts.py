"""Values that are split already reach their replicas as they are."""

import pytest
import torch
from torch import nn

from dphybrid.parallel import DataParallel, parts


@pytest.mark.parametrize("strict", [False, True])
def test_parts_and_whole_tensors_go_together(strict: bool) -> None:
    region = DataParallel(nn.Bilinear(3, 3, 2), "cpu*3", strict=strict)
    left, right = torch.randn(7, 3), torch.randn(7, 3)
    leaves = [part.clone().requires_grad_() for part in left.split(region.sizes(7))]
    torch.testing.assert_close(region(parts(leaves), right), region.module(left, right))
    region(parts(leaves), right).sum().backward()
    expected = torch.autograd.grad(region.module(whole := left.clone().requires_grad_(), right).sum(), whole)[
        0
    ]
    torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]), expected)


def test_parts_of_another_split_are_refused() -> None:
    region = DataParallel(nn.Linear(3, 2), "cpu*2")
    with pytest.raises(ValueError, match=r"parts of \[3, 1\] rows in a batch that is split into \[2, 2\]"):
        region(parts([torch.zeros(3, 3), torch.zeros(1, 3)]))
    with pytest.raises(ValueError, match="2 parts for a region with one device"):
        DataParallel(nn.Linear(3, 2), "cpu", whole=["mask"])(parts([torch.zeros(3, 3), torch.zeros(1, 3)]))
