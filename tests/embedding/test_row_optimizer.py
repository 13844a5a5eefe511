"""A row optimizer is a torch.optim.Optimizer: groups, schedulers, closures, hooks, and states."""

import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

from dphybrid.embedding import (
    HostEmbedding,
    clip_grad_norm_,
    row_optimizer,
)
from dphybrid.parallel import DataParallel
from dphybrid.util.row_rules import RULES

ROWS, DIM = 12, 4
ALL = torch.arange(ROWS)


def table(name: str = "words", **options: Any) -> HostEmbedding:
    return HostEmbedding(ROWS, DIM, dtype=torch.float64, seed=3, name=name, **options)


def backward(one: HostEmbedding, scale: float = 1.0) -> None:
    (scale * one(ALL)).square().sum().backward()


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR, beta": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 4)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_steps_of_torchs_own(name: str) -> None:
    ours = table()
    dense = nn.Parameter(ours.weight.clone())
    rule, kind = ("lazy-adam", torch.optim.Adam) if "beta" in name else ("sgd", torch.optim.SGD)
    optimizers = row_optimizer(rule, ours, lr=0.05), kind([dense], lr=0.05)  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SequentialLR's own, of the order of its parts' steps
        courses = [SCHEDULES[name](optimizer) for optimizer in optimizers]
        for _ in range(7):
            for rows, optimizer, course in zip(
                (lambda: ours(ALL), lambda: F.embedding(ALL, dense)), optimizers, courses, strict=True
            ):
                optimizer.zero_grad()
                rows().square().sum().backward()
                optimizer.step()
                course.step()
    assert [g["lr"] for g in optimizers[0].param_groups] == [g["lr"] for g in optimizers[1].param_groups]
    torch.testing.assert_close(ours.weight.detach(), dense.detach(), rtol=1e-9, atol=1e-9)


def test_a_group_a_table_each_with_numbers_of_its_own() -> None:
    one, two, three = table("one"), table("two"), table("three")
    rows = row_optimizer("sgd", {"a": one, "b": two, "again": one}, lr=0.5)
    assert isinstance(rows, torch.optim.Optimizer)
    assert [group["param_names"] for group in rows.param_groups] == [["a"], ["b"]]
    assert rows.param_groups[0]["params"][0] is one.weight
    rows.param_groups[1]["lr"] = 0.25
    rows.add_param_group({"params": [("three", three.weight)], "lr": 1.0, "weight_decay": 0.5})
    before = [t.weight.detach().clone() for t in (one, two, three)]
    for t in (one, two, three):
        t(ALL).sum().backward()
    rows.step()
    torch.testing.assert_close(one.weight, before[0] - 0.5)
    torch.testing.assert_close(two.weight, before[1] - 0.25)
    torch.testing.assert_close(three.weight, before[2] - 1 - 0.5 * before[2])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: row_optimizer("sgd", nn.Linear(2, 2).parameters(), lr=0.1), "give it a table, a model"),
        (lambda: row_optimizer("sgd", {"a": nn.Linear(2, 2)}, lr=0.1), "give it a table, a model"),
        (lambda: row_optimizer("sgd", {}, lr=0.1), "no table"),
        (lambda: row_optimizer("sgd", nn.Linear(2, 2), lr=0.1), "no table"),
        (lambda: row_optimizer("lazy-adam", table(), eps=math.nan), "eps=nan; give finite numbers"),
        (
            lambda: row_optimizer("adam", table(), lr=float("inf")),
            r"lr=inf, weight_decay=0\.0, eps=1e-08; give finite numbers",
        ),
    ],
)
def test_what_is_no_table_or_no_number_is_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_closure_computes_anew_and_its_loss_is_returned() -> None:
    ours = table()
    rows = row_optimizer("sgd", ours, lr=0.1)

    def closure() -> Tensor:
        rows.zero_grad()
        loss = ours(ALL).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(rows.step(closure)) for _ in range(3)]
    assert losses[1:] == pytest.approx([losses[0] * 0.64, losses[0] * 0.64**2])


def test_hooks_of_an_optimizer_are_called() -> None:
    rows, seen = row_optimizer("sgd", table(), lr=0.1), []
    rows.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    for register in (rows.register_step_pre_hook, rows.register_step_post_hook):
        register(lambda *_: seen.append("step"))
    rows.step()
    rows.load_state_dict(rows.state_dict())
    assert seen == ["step", "step", "loaded"]


@pytest.mark.parametrize("kind", RULES)
def test_states_go_the_way_of_torchs_own(kind: str) -> None:
    def train(one: HostEmbedding, rows: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            rows.zero_grad()
            one(ALL[step : step + 4]).square().sum().backward()
            rows.step()

    one, two = table(), table()
    first, second = (row_optimizer(kind, t, lr=0.1) for t in (one, two))
    train(one, first, range(4))
    first.param_groups[0]["lr"] = 0.05
    state = first.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert state["param_groups"][0]["params"] == [0]
    two.weight.detach().copy_(one.weight)
    own = {key: value.data_ptr() for key, value in second.states().items()}
    second.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert {key: value.data_ptr() for key, value in second.states().items()} == own  # in place
    assert second.param_groups[0]["lr"] == 0.05
    train(one, first, range(4, 8))
    train(two, second, range(4, 8))
    assert torch.equal(one.weight, two.weight)
    with pytest.raises(ValueError, match="missing b|different number of parameter groups"):
        row_optimizer(kind, {"a": one, "b": two}, lr=0.1).load_state_dict(state)
    again = pickle.loads(pickle.dumps(first))
    assert type(again) is type(first)
    assert all(torch.equal(again.states()[name], value) for name, value in first.states().items())


@pytest.mark.parametrize("width", [8, 6])
def test_adamw_counts_the_updates_of_each_table_by_itself(width: int) -> None:
    one, two = HostEmbedding(4, 8, name="one"), HostEmbedding(4, width, name="two")
    rows = row_optimizer("adamw", {"one": one, "two": two}, lr=0.1, weight_decay=0.1)
    weight = nn.Parameter(two.weight.detach().clone())
    of_torch = torch.optim.AdamW([weight], lr=0.1, betas=(0.0, 0.999), weight_decay=0.1)
    for step in range(20):
        loss = one(torch.tensor([0, 1])).square().sum()
        if step in (0, 4, 19):  # else the other table is not used
            loss = loss + two(torch.arange(4)).square().sum()
            weight.square().sum().backward()
        loss.backward()
        for optimizer in (rows, of_torch):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(two.weight.detach(), weight.detach())
    assert [int(rows.states()[f"{name}.updates"]) for name in ("one", "two")] == [20, 3]


@pytest.mark.parametrize("kind", RULES)
def test_a_weight_that_is_not_trained_gets_states_once_it_is(kind: str) -> None:
    one = table(freeze=True)
    rows = row_optimizer(kind, one, lr=0.1)
    assert not rows.states()
    rows.load_state_dict(rows.state_dict())
    one.weight.requires_grad_(True)
    backward(one)
    before = one.weight.detach().clone()
    rows.step()
    assert not torch.equal(one.weight.detach(), before)
    assert rows.states().keys() == row_optimizer(kind, table(), lr=0.1).states().keys()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_clipping_spreads_a_bad_gradient_as_torch_does(value: float) -> None:
    found = []
    for clip in (nn.utils.clip_grad_norm_, clip_grad_norm_):
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        parameters[0].grad, parameters[1].grad = torch.tensor([value, 0.0]), torch.tensor([1e3, 1e3])
        clip(parameters, 1.0)
        found.append([parameter.grad for parameter in parameters])
    torch.testing.assert_close(found[0], found[1], equal_nan=True)


@pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*3"])
def test_a_second_backward_needs_a_retained_graph(devices: str) -> None:
    table, region = HostEmbedding(3, 2), DataParallel(nn.Linear(2, 1), devices)
    loss = region.rows(table, torch.arange(3))
    loss = (loss if isinstance(loss, Tensor) else region(loss)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


class Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, used: Tensor, unused: Tensor) -> Tensor:
        return used + unused

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Both(nn.Module):
    def forward(self, used: Tensor, unused: Tensor) -> Tensor:
        return cast(Tensor, Unused.apply(used, unused)).sum(1)


@pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*3"])
def test_rows_to_which_autograd_gives_no_gradient_are_not_trained(devices: str) -> None:
    tables, ids = {name: HostEmbedding(6, 4, name=name) for name in "ab"}, torch.arange(6)
    region, rows = DataParallel(Both(), devices), row_optimizer("adam", tables, lr=0.1)
    tables["b"](ids).sum().backward()
    rows.step()  # a mean, which would move the rows at a gradient of zeros
    rows.zero_grad()
    before = tables["b"].weight.detach().clone()
    region(*(region.rows(table, ids) for table in tables.values())).sum().backward()
    assert tables["b"].weight.grad is None
    rows.step()
    assert torch.equal(tables["b"].weight.detach(), before)


@pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*3"])
def test_hooks_on_a_table_get_one_tensor(devices: str) -> None:
    table, region = HostEmbedding(5, 2, seed=0), DataParallel(nn.Linear(2, 1), devices)
    seen = []
    table.register_forward_hook(lambda _, __, rows: rows + torch.rand(rows.shape[-1]))
    table.register_full_backward_hook(lambda _, __, grads: seen.append(grads[0].shape))
    torch.manual_seed(0)
    rows = region.rows(table, torch.arange(4))
    joined = rows if isinstance(rows, Tensor) else rows.joined(torch.device("cpu"), 0)
    torch.manual_seed(0)
    assert torch.equal(joined, table.weight.detach()[:4] + torch.rand(2))
    region(rows).sum().backward()
    assert seen == [(4, 2)]
    assert table.weight.grad is not None
