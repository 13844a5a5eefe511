"""Options of tables and optimizers are used or refused; torch's transforms see a lookup as nn.Embedding's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap

from dphybrid.embedding import (
    HostEmbedding,
    RowPipeline,
    clip_grad_norm_,
    row_optimizer,
)
from dphybrid.parallel import DataParallel
from dphybrid.util.errors import UserError

IDS = torch.tensor([[1, 2, 2], [3, 5, 1]])


def table() -> HostEmbedding:
    return HostEmbedding(6, 2, seed=0)


def wrong(value: object) -> Any:
    """Return a value of a type that does not fit."""
    return value


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: row_optimizer("adagrad", table(), lr=1, epss=1), "no option 'epss'; did you mean 'eps'"),
        (
            lambda: row_optimizer("sgd", table(), lr=1, momentum=0.9),
            "no option 'momentum'; known: weight_decay",
        ),
        (lambda: row_optimizer("sgd", table(), lr=1, weight_decay=None), "weight_decay=None"),
        (lambda: row_optimizer("lazy-adam", table(), lr=1, betas=(0.9, 0.99, 0.9)), "two betas"),
        *(
            (lambda size=size: HostEmbedding(*size), "both must be integers of at least 1")
            for size in ((0, 4), (10, -4), (wrong(1e6), 4), (10, wrong("4")), (True, 4), (10, 20_000))
        ),
        (lambda: HostEmbedding(6, 2, std=-1.0), "std=-1.0"),
        (lambda: HostEmbedding(6, 2, padding_idx=wrong(1.0)), "padding_idx=1.0"),
        (lambda: clip_grad_norm_(table().parameters(), -1.0), "max_norm=-1.0"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(call: Callable[[], object], words: str) -> None:
    with pytest.raises((UserError, TypeError), match=words):
        call()


def test_tied_tables_and_shallow_copies_have_the_padding_of_their_one_weight() -> None:
    padded, tied = HostEmbedding(6, 2, padding_idx=3, seed=0), HostEmbedding(6, 2, seed=1)
    tied.weight = padded.weight
    shallow = copy.copy(tied)
    assert shallow.weight is tied.weight
    one, two = copy.deepcopy((tied, padded))
    assert one.weight is two.weight

    def trained(table: HostEmbedding) -> list[int]:
        table(torch.arange(6)).sum().backward()
        rows: list[int] = table.weight.grad.coalesce().indices()[0].tolist()
        table.weight.grad = None
        return rows

    for table in (padded, tied, shallow, one, two):
        assert trained(table) == [0, 1, 2, 4, 5]
    tied.weight = nn.Parameter(padded.weight.detach().clone())  # a new weight has the padding of its module
    assert trained(tied) == list(range(6))


def test_a_table_without_a_weight_says_so() -> None:
    without = table()
    without.weight = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="or was removed"):
        without(IDS)


def cubes(module: nn.Module, weight: Tensor) -> Tensor:
    looked_up: Tensor = functional_call(module, {"weight": weight}, (IDS,))
    return (looked_up**3).sum()


def on_two(table: HostEmbedding) -> Tensor:
    region = DataParallel(nn.Identity(), "cpu*2")
    rows: Tensor = region(region.rows(table, IDS))
    return rows


def in_forward_mode(table: HostEmbedding) -> None:
    with forward_ad.dual_level():
        table(IDS)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: grad(lambda w: cubes(t, w))(t.weight.detach()),
        lambda t: vmap(lambda w: cubes(t, w))(t.weight.detach()[None]),
        lambda t: torch.autograd.grad(t(IDS[0])[:, 0], t.weight, torch.eye(3), is_grads_batched=True),
        lambda t: torch.autograd.grad((t(IDS) ** 3).sum(), t.weight, create_graph=True),
        lambda t: torch.autograd.grad((on_two(t) ** 3).sum(), t.weight, create_graph=True),
        in_forward_mode,
    ],
    ids=["grad", "vmap", "batched", "second order", "second order through a split", "forward mode"],
)
def test_derivatives_that_tables_do_not_have_are_refused(use: Callable[[HostEmbedding], object]) -> None:
    with pytest.raises(UserError, match="has no derivatives by torch.func.*; use nn.Embedding"):
        use(table())


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_a_default_device_does_not_move_what_tables_compute_with(devices: str) -> None:
    ids = torch.arange(8).view(4, 2) % 5

    def trained(default: str) -> Tensor:
        with torch.device(default):
            table = HostEmbedding(12, 2, padding_idx=6, seed=0)
            region, rows = DataParallel(nn.Identity(), devices), row_optimizer("lazy-adam", table, lr=0.1)
            with RowPipeline({"t": table}, on_cpu=True) as pipeline:
                for batch in pipeline.prefetch([ids, ids.flip(0), ids], lambda b: {"t": b}):
                    rows.zero_grad()
                    loss = (region(region.rows(table, batch)) ** 3).sum() + table.weight.square().sum()
                    loss.backward()
                    clip_grad_norm_(table.parameters(), 0.5)
                    rows.step()
        return table.weight.detach()

    assert torch.equal(trained("meta"), trained("cpu"))
