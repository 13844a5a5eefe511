"""Tables whose weight is exchanged, and rows that are not trained, beside nn.Embedding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dphybrid.embedding import (
    HostEmbedding,
    clip_grad_norm_,
    row_optimizer,
)
from dphybrid.parallel import DataParallel

ROWS, GROWN, DIM = 30, 40, 3
DEVICES = pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*3"])
IDS = torch.tensor([[0, 1], [0, 2], [3, 0], [4, 5], [0, 0]])


def tables(padding: int | None = None, rows: int = ROWS) -> tuple[HostEmbedding, nn.Embedding]:
    """A table and torch's own, with equal rows."""
    torch.manual_seed(0)
    own = nn.Embedding(rows, DIM, padding, sparse=True, dtype=torch.float64)
    table = HostEmbedding(rows, DIM, padding, dtype=torch.float64)
    table.load_state_dict(own.state_dict())
    return table, own


def layers() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(DIM, 1, dtype=torch.float64)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda table: torch.optim.SGD(table.parameters(), 1.0),
    "Adagrad": lambda table: torch.optim.Adagrad(table.parameters(), 0.1),
    "SparseAdam": lambda table: torch.optim.SparseAdam(table.parameters(), 0.1),
    "rows": lambda table: row_optimizer("sgd", table, lr=1.0),
}


@DEVICES
@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_padding_row_has_no_gradient_as_in_torch(devices: str, lookups: int, optimizer: str) -> None:
    table, own = tables(padding=0)
    region, alone, found = DataParallel(layers(), devices), layers(), []
    make = OPTIMIZERS[optimizer]
    rows, others = make(table), make(own) if optimizer != "rows" else OPTIMIZERS["SGD"](own)
    for _ in range(3):
        for each, net, weight, step in (
            (lambda: region.rows(table, IDS), region, table.weight, rows),
            (lambda: own(IDS), alone, own.weight, others),
        ):
            loss = sum(net(each()).square().mean() for _ in range(lookups))
            (weight.grad,) = torch.autograd.grad(loss, weight)
            found.append(weight.grad.coalesce().values().norm())
            step.step()
    torch.testing.assert_close(found[::2], found[1::2])
    torch.testing.assert_close(table.weight, own.weight, rtol=1e-6, atol=1e-9)


@DEVICES
def test_padding_has_no_gradient_however_it_is_made(devices: str) -> None:
    torch.manual_seed(0)
    table = HostEmbedding(ROWS, DIM, 0, dtype=torch.float64)
    region, before = DataParallel(layers(), devices), table.weight.detach().clone()
    table(IDS).sum().backward()
    region(region.rows(table, IDS)).sum().backward()
    assert table.weight.grad is not None
    assert 0 not in table.weight.grad._indices()[0].tolist()
    clip_grad_norm_(table.weight, 0.1)
    row_optimizer("adam", table, lr=0.1).step()
    assert (table.weight.detach() != before).any(1).nonzero()[:, 0].tolist() == list(range(1, 6))


def test_a_penalty_over_the_whole_weight_leaves_padding_to_row_optimizers_unchanged() -> None:
    table, _ = tables(padding=2)
    before = table.weight.detach().clone()
    table.weight.square().sum().backward()
    clip_grad_norm_(table.weight, 1.0)
    row_optimizer("sgd", table, lr=1.0).step()
    assert (table.weight.detach() == before).all(1).nonzero()[:, 0].tolist() == [2]


def test_a_weight_that_is_given_to_one_call_keeps_the_padding() -> None:
    table, _ = tables(padding=0)
    weight = table.weight.detach().clone().requires_grad_()
    functional_call(table, {"weight": weight}, (IDS,)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.to_dense().any(1)[:3].tolist() == [False, True, True]
