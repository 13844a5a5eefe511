"""Tables whose weight is exchanged, and rows that are not trained, beside nn.Embedding."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dphybrid.embedding import (
    HostEmbedding,
    HostEmbeddingCollection,
    RowPipeline,
    RowSGD,
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


class Model(nn.Module):
    table: Any

    def __init__(self, table: nn.Module, devices: str | None) -> None:
        super().__init__()
        self.table, self.other = table, copy.deepcopy(table)
        self.net = layers() if devices is None else DataParallel(layers(), devices)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids) if isinstance(self.net, nn.Linear) else self.net.rows(self.table, ids)
        loss: Tensor = self.net(rows).square().mean()
        return loss


def exchange(kind: str, model: Model, step: int, averaged: nn.Parameter, seen: list[float]) -> None:
    table = model.table
    live: nn.Parameter = table.weight  # type: ignore[assignment]
    if kind == "average" and step % 3 == 0:
        table.weight = averaged
        seen.append(model(batch(step + 100, ROWS)).item())
        table.weight = live
    elif kind == "average by data" and step % 3 == 0:
        kept, live.data = live.data, averaged.data.clone()
        seen.append(model(batch(step + 100, ROWS)).item())
        live.data = kept
    elif kind == "grow" and step == 5:
        table.weight = nn.Parameter(torch.cat([live.detach(), torch.ones(GROWN - ROWS, DIM).double()]))
    elif kind == "tie and untie" and step in (3, 6):
        table.weight = model.other.weight if step == 3 else nn.Parameter(live.detach() * 2)
    with torch.no_grad():
        averaged[:ROWS].lerp_(live[:ROWS], 0.1)


def batch(step: int, rows: int) -> Tensor:
    return torch.randint(rows, (7,), generator=torch.Generator().manual_seed(step))


def trained(kind: str, devices: str | None, mode: str = "off") -> list[float]:
    table, own = tables()
    model = Model(own if devices is None else table, devices)
    averaged, seen = nn.Parameter(model.table.weight.detach().clone()), list[float]()  # type: ignore[operator]
    rows = [batch(step, GROWN if kind == "grow" and step >= 6 else ROWS) for step in range(12)]
    with RowPipeline(model, mode=mode, on_cpu=True) as pipeline:
        for step, ids in enumerate(pipeline.prefetch(rows, lambda ids: {"table": ids})):
            exchange(kind, model, step, averaged, seen)
            loss = model(ids)
            loss.backward()
            weight = model.table.weight
            (torch.optim.SGD([weight], 0.5) if devices is None else RowSGD([weight], lr=0.5)).step()
            model.zero_grad()
            seen.append(loss.item())
    return seen


@pytest.mark.parametrize(("devices", "mode"), [("cpu", "off"), ("cpu*2", "exact"), ("cpu*3", "off")])
@pytest.mark.parametrize("kind", ["average", "average by data", "grow", "tie and untie"])
def test_a_lookup_has_the_rows_of_the_present_weight(kind: str, devices: str, mode: str) -> None:
    assert trained(kind, devices, mode) == pytest.approx(trained(kind, None), rel=1e-12)


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
@pytest.mark.parametrize("count", [1, 3])
def test_frozen_rows_have_no_gradient_however_it_is_made(devices: str, count: int) -> None:
    table, _ = tables(padding=0)
    table.freeze_rows(range(count))
    assert table.frozen_rows == list(range(count))
    region, before = DataParallel(layers(), devices), table.weight.detach().clone()
    untrained = list(range(count))
    torch.compile(table, backend="eager")(IDS).sum().backward()
    region(region.rows(table, IDS)).sum().backward()
    assert table.weight.grad is not None
    assert not set(table.weight.grad._indices()[0].tolist()) & set(untrained)
    clip_grad_norm_(table.weight, 0.1)
    row_optimizer("adam", table, lr=0.1).step()
    assert (table.weight.detach() != before).any(1).nonzero()[:, 0].tolist() == list(range(count, 6))


def test_rows_frozen_after_a_backward_are_left_out_of_its_gradient() -> None:
    table, _ = tables()
    before = table.weight.detach().clone()
    table(torch.arange(3)).sum().backward()
    table.freeze_rows([1])
    RowSGD(table, lr=1.0).step()
    assert (table.weight.detach() != before).any(1)[:3].tolist() == [True, False, True]


def test_a_penalty_over_the_whole_weight_leaves_frozen_rows_to_row_optimizers_unchanged() -> None:
    table, _ = tables(padding=2)
    before = table.weight.detach().clone()
    table.weight.square().sum().backward()
    clip_grad_norm_(table.weight, 1.0)
    RowSGD(table, lr=1.0).step()
    assert (table.weight.detach() == before).all(1).nonzero()[:, 0].tolist() == [2]


def test_padding_of_a_collection_stays_frozen() -> None:
    items = HostEmbeddingCollection({"item": 5, "user": 4}, 3, padding={"item": 4, "user": 3}, seed=0)
    for frozen, expected in (([0], [0, 4, 8]), ([], [4, 8])):
        items.flat.freeze_rows(frozen)
        assert items.flat.frozen_rows == expected
    copied = copy.deepcopy(items)
    copied.flat.freeze_rows([1])
    assert (copied.flat.frozen_rows, items.flat.frozen_rows) == ([1, 4, 8], [4, 8])


def test_a_weight_that_is_given_to_one_call_keeps_the_padding() -> None:
    table, _ = tables(padding=0)
    weight = table.weight.detach().clone().requires_grad_()
    functional_call(table, {"weight": weight}, (IDS,)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.to_dense().any(1)[:3].tolist() == [False, True, True]
