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
    CombinedOptimizer,
    HostEmbedding,
    HostEmbeddingCollection,
    LazyAdam,
    RowAdagrad,
    RowPipeline,
    RowSGD,
    clip_grad_norm_,
)
from dphybrid.parallel import DataParallel
from dphybrid.util.errors import UserError

IDS = torch.tensor([[1, 2, 2], [3, 5, 1]])


def table() -> HostEmbedding:
    return HostEmbedding(6, 2, seed=0)


def wrong(value: object) -> Any:
    """Return a value of a type that does not fit."""
    return value


def loaded(change: Callable[[dict[str, Any]], object]) -> None:
    state = copy.deepcopy(RowAdagrad(table().parameters(), lr=0.1).state_dict())
    change(state["param_groups"][0])
    RowAdagrad(table().parameters(), lr=0.1).load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RowSGD([{"params": [table().weight], "lrr": 1}], lr=1), "'lrr'; did you mean 'lr'"),
        (lambda: RowSGD([{"params": [table().weight], "eps": 1}], lr=1), "'eps'; known: lr, weight_decay"),
        (lambda: RowAdagrad(table().parameters(), lr=1, epss=1), "'epss'; did you mean 'eps'"),
        (lambda: RowSGD([{"param": [table().weight]}], lr=1), "without 'params'"),
        (lambda: RowSGD(table(), lr=1, momentum=0.9), "unexpected keyword argument 'momentum'"),
        (lambda: RowSGD(table().parameters(), lr=1, weight_decay=None), "weight_decay=None"),
        (lambda: LazyAdam(table().parameters(), lr=1, betas=(0.9, 0.99, 0.9)), "two betas"),
        (lambda: loaded(lambda group: group.update(momentum=0.9)), "has an option 'momentum'"),
        (lambda: loaded(lambda group: group.pop("eps")), "lacks the option 'eps'"),
        (lambda: loaded(lambda group: group.update(lr=float("nan"))), "lr=nan"),
        (lambda: HostEmbeddingCollection({"a": 3}, 2, std={"a": 0.1, "b": 1.0}), "std has 'b'"),
        (lambda: HostEmbeddingCollection({"a": 3}, 2, padding={"b": 0}), "padding 'b'"),
        (lambda: HostEmbeddingCollection({"users": 3}, 2).weight_of("user"), "did you mean 'users'"),
        *(
            (lambda size=size: HostEmbedding(*size), "both must be integers of at least 1")
            for size in ((0, 4), (10, -4), (wrong(1e6), 4), (10, wrong("4")), (True, 4), (10, 20_000))
        ),
        (lambda: HostEmbedding(6, 2, scales=[(3, 100, 0.0)]), "rows are 0 to 5"),
        (lambda: HostEmbedding(6, 2, std=-1.0), "std=-1.0"),
        (lambda: HostEmbedding(6, 2, seed=wrong(1.5)), "seed=1.5"),
        (lambda: HostEmbedding(6, 2, padding_idx=wrong(1.0)), "padding_idx=1.0"),
        (lambda: HostEmbedding.from_pretrained(torch.ones(3, 2), std=5.0), "'std' has no effect"),
        (lambda: table().freeze_rows(wrong(torch.tensor([True, False]))), "True is not a row"),
        (lambda: table().freeze_rows(wrong([1.5])), "1.5 is not a row"),
        (lambda: clip_grad_norm_(table().parameters(), -1.0), "max_norm=-1.0"),
        (lambda: RowPipeline(wrong([table()])), "give the model"),
        (lambda: CombinedOptimizer(*2 * [RowSGD(table().parameters(), lr=1)]), "the same parameter"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(call: Callable[[], object], words: str) -> None:
    with pytest.raises((UserError, TypeError), match=words):
        call()


def test_groups_may_have_a_name_and_what_schedules_note() -> None:
    rows = RowSGD([{"params": [table().weight], "lr": 0.5, "name": "users"}], lr=1)
    torch.optim.lr_scheduler.OneCycleLR(rows, max_lr=1.0, total_steps=10, cycle_momentum=False)
    RowSGD(table().parameters(), lr=1).load_state_dict(rows.state_dict())
    copied = copy.deepcopy(rows)  # to whose further groups torch adds an option of its own
    copied.add_param_group({"params": [("more", table().weight)]})
    copied.load_state_dict(copied.state_dict())


def test_tied_tables_and_shallow_copies_freeze_the_rows_of_their_one_weight() -> None:
    padded, tied = HostEmbedding(6, 2, padding_idx=3, seed=0), HostEmbedding(6, 2, seed=1)
    tied.weight = padded.weight
    shallow = copy.copy(tied)
    assert shallow.weight is tied.weight
    for freezing in (padded, tied, shallow):
        rows, before = RowSGD(padded.parameters(), lr=1), padded.weight.detach().clone()
        freezing.freeze_rows([1])
        padded(torch.arange(6)).sum().backward()
        rows.step()
        rows.zero_grad()
        assert (padded.weight.detach() != before).any(1).tolist() == [True, False, True, False, True, True]
        freezing.freeze_rows([])
    one, two = copy.deepcopy((padded, tied))
    assert one.weight is two.weight
    one.freeze_rows([2])
    assert two.frozen_rows == [2, 3]
    tied.weight = nn.Parameter(padded.weight.detach().clone())  # a new weight has the padding of its module
    assert (padded.frozen_rows, tied.frozen_rows) == ([3], [])


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
def test_hooks_of_a_collection_see_lookups_for_a_region(devices: str) -> None:
    tables = HostEmbeddingCollection({"a": 6, "b": 6}, 2, seed=0)
    region, seen = DataParallel(nn.Identity(), devices), list[int]()
    tables.register_forward_hook(lambda _, __, rows: seen.append(len(rows)))
    region(region.rows(tables, IDS[:, :2]))
    assert seen == [2]


def test_tied_tables_are_fetched_ahead_with_the_same_bits() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = HostEmbedding(60, 2, name="one", seed=0), HostEmbedding(60, 2, name="two")
            self.two.weight = self.one.weight
            self.net = DataParallel(nn.Identity(), "cpu*2")

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.net(self.net.rows(self.one, ids)) * self.net(self.net.rows(self.two, ids + 1))
            return out

    found = []
    for mode in ("off", "exact"):
        model = Tied()
        rows = RowAdagrad(model.one, lr=0.1)
        with RowPipeline(model, mode=mode, on_cpu=True) as pipeline:
            batches = [torch.arange(8) * k % 59 for k in range(6)]
            for ids in pipeline.prefetch(batches, lambda ids: {"one": ids, "two": ids + 1}):
                rows.zero_grad()
                model(ids).square().sum().backward()
                rows.step()
            counts = pipeline.counters()
        assert counts["ids"] == 6 * 16
        assert counts["prepared_ratio"] > 0.5 or mode == "off"
        found.append(model.one.weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_a_default_device_does_not_move_what_tables_compute_with(devices: str) -> None:
    ids = torch.arange(8).view(4, 2) % 5

    def trained(default: str) -> Tensor:
        with torch.device(default):
            tables = HostEmbeddingCollection({"a": 6, "b": 6}, 2, padding={"b": 0}, seed=0)
            region, rows = DataParallel(nn.Identity(), devices), LazyAdam(tables.flat, lr=0.1)
            with RowPipeline({"flat": tables.flat}, on_cpu=True) as pipeline:
                for batch in pipeline.prefetch(
                    [ids, ids.flip(0), ids], lambda b: {"flat": tables.flat_ids(b)}
                ):
                    rows.zero_grad()
                    loss = (region(region.rows(tables, batch)) ** 3).sum() + tables.flat.weight.square().sum()
                    loss.backward()
                    clip_grad_norm_(tables.parameters(), 0.5)
                    rows.step()
        return tables.flat.weight.detach()

    assert torch.equal(trained("meta"), trained("cpu"))
