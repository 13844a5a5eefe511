"""Replicas on one device share memory until one of them writes: what they compute is what copies give."""

import pytest
import torch
from torch import Tensor, nn

from dphybrid.parallel import DataParallel
from dphybrid.parallel.replication import replicate


class Writer(nn.Module):
    """Writes to its parameter and its buffer in forward, after it has used them."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight.detach() + self.count
        with torch.no_grad():
            self.weight.add_(1)
            self.count.add_(1)
        return out


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_on_one_device_have_memory_of_their_own(detach: bool) -> None:
    linear = nn.Linear(64, 64)
    held = [dict(replica.named_parameters())["weight"] for replica in replicate(linear, "cpu*3", detach)]
    assert held[0].data_ptr() == linear.weight.data_ptr()
    assert len({weight.data_ptr() for weight in held}) == 3


def test_what_a_replica_writes_to_a_parameter_reaches_no_other_replica() -> None:
    writer = Writer()
    out = DataParallel(writer, "cpu*3")(torch.ones(6, 3))
    assert out.tolist() == torch.ones(6, 3).tolist()
    assert writer.weight.tolist() == [2, 2, 2]  # replica 0's, as with torch.nn.DataParallel
    assert writer.count.tolist() == [1, 1, 1]
