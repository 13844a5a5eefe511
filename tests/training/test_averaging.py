"""The moving average of weights: against torch's own, and in the place of the weights."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dphybrid.training.optimizers import averaged, keep_average


def test_it_is_the_exponential_average_of_the_weights_after_each_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    keep_average(optimizer, 0.9)
    steps = 0

    def rising(average: torch.Tensor, now: torch.Tensor, _: object) -> torch.Tensor:
        decay = min(0.9, (1 + steps) / (10 + steps))
        return decay * average + (1 - decay) * now

    reference = AveragedModel(model, avg_fn=rising)
    for _ in range(120):
        optimizer.zero_grad()
        model(torch.randn(5, 3).double()).square().sum().backward()
        optimizer.step()
        steps += 1
        reference.update_parameters(model)
    before = copy.deepcopy(model.state_dict())
    with averaged(optimizer):
        for name, value in reference.module.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(before["0.weight"], reference.module.state_dict()["0.weight"])


def test_a_parameter_without_gradients_waits_and_other_optimizers_are_left_alone() -> None:
    used, later = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([used, later], lr=0.1)
    keep_average(optimizer, 0.5)
    used.sum().backward()
    optimizer.step()
    with averaged(optimizer):
        assert torch.equal(later, torch.ones(2))
    optimizer.zero_grad()
    (used + later).sum().backward()
    optimizer.step()  # its own state begins now
    assert bool((later < 1).all())
    with averaged(torch.optim.SGD([used], lr=0.1)), averaged(None):
        assert not torch.equal(used, later)
