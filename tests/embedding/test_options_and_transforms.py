"""Options of tables and optimizers are used or refused; torch's transforms see a lookup as nn.Embedding's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vjp, vmap

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
        (lambda: RowSGD(table().parameters(), lr=1, weight_decay=None), "weight_decay=None"),
        (lambda: LazyAdam(table().parameters(), lr=1, betas=(0.9, 0.99, 0.9)), "two betas"),
        (lambda: loaded(lambda group: group.update(momentum=0.9)), "has an option 'momentum'"),
        (lambda: loaded(lambda group: group.pop("eps")), "lacks the option 'eps'"),
        (lambda: loaded(lambda group: group.update(lr=float("nan"))), "lr=nan"),
        (lambda: HostEmbeddingCollection({"a": 3}, 2, std={"a": 0.1, "b": 1.0}), "std has 'b'"),
        (lambda: HostEmbeddingCollection({"a": 3}, 2, padding={"b": 0}), "padding 'b'"),
        (lambda: HostEmbeddingCollection({"users": 3}, 2).weight_of("user"), "did you mean 'users'"),
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


def test_an_option_that_is_misspelt_later_is_refused_by_the_next_step() -> None:
    one = table()
    rows = RowAdagrad(one, lr=0.1)
    rows.param_groups[0]["note"] = "the user's"
    one(IDS).sum().backward()
    rows.step()
    rows.param_groups[0]["weight_decy"] = 0.1
    with pytest.raises(
        TypeError, match="key of a parameter group 'weight_decy'; did you mean 'weight_decay'"
    ):
        rows.step()


@pytest.mark.parametrize("grouped", [True, False])
def test_states_find_their_tables_by_name(grouped: bool) -> None:
    one, two = ({name: table() for name in names} for names in ("ab", "ba"))
    first, second = (RowAdagrad(tables if grouped else list(tables.items()), lr=0.1) for tables in (one, two))
    one["a"](IDS).sum().backward()
    first.step()
    first.param_groups[0]["lr"] = 0.7
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.states()["a.sum"], first.states()["a.sum"])
    assert not second.states()["b.sum"].any()
    assert [group["lr"] for group in second.param_groups] == ([0.1, 0.7] if grouped else [0.7])


def test_tied_tables_and_shallow_copies_freeze_the_rows_of_their_one_weight() -> None:
    padded, tied = HostEmbedding(6, 2, padding_idx=3, seed=0), HostEmbedding(6, 2, seed=1)
    tied.weight = padded.weight
    shallow = copy.copy(tied)
    assert shallow.weight is tied.weight
    for freezing in (padded, tied, shallow):
        rows, before = RowSGD(padded.parameters(), lr=1), padded.settled().clone()
        freezing.freeze_rows([1])
        padded(torch.arange(6)).sum().backward()
        rows.step()
        rows.zero_grad()
        assert (padded.settled() != before).any(1).tolist() == [True, False, True, False, True, True]
        freezing.freeze_rows([])
    one, two = copy.deepcopy((padded, tied))
    assert one.weight is two.weight
    one.freeze_rows([2])
    assert two.frozen_rows == [2, 3]


def test_a_table_without_a_weight_says_so() -> None:
    without = table()
    without.weight = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="or was removed"):
        without(IDS)


def both(table: HostEmbedding) -> tuple[HostEmbedding, nn.Embedding]:
    return table, nn.Embedding.from_pretrained(table.settled().clone(), freeze=False)


def loss(module: nn.Module, weight: Tensor, ids: Tensor) -> Tensor:
    looked_up: Tensor = functional_call(module, {"weight": weight}, (ids,))
    return (looked_up**3).sum()


@pytest.mark.parametrize(
    "of",
    [
        lambda m, w: grad(lambda w: loss(m, w, IDS))(w),
        lambda m, w: jvp(lambda w: loss(m, w, IDS), (w,), (torch.ones_like(w),))[1],
        lambda m, w: vjp(lambda w: loss(m, w, IDS), w)[1](torch.tensor(2.0))[0],
        lambda m, w: vmap(grad(lambda w, ids: loss(m, w, ids)), (None, 0))(w, IDS),
        lambda m, w: vmap(lambda w: functional_call(m, {"weight": w}, (IDS,)))(torch.stack([w, 2 * w])),
    ],
    ids=["grad", "jvp", "vjp", "each sample", "several weights"],
)
def test_transforms_of_torch_func_see_a_lookup(of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    mine, theirs = (of(module, module.weight.detach()) for module in both(table()))
    assert mine.abs().sum() > 0
    torch.testing.assert_close(mine, theirs)


class LookedUp(nn.Module):
    def __init__(self, devices: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.net = HostEmbedding(6, 4, seed=1), DataParallel(nn.Linear(4, 3), devices)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.net(self.net.rows(self.table, ids)).tanh()
        return out


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_hooks_of_a_collection_see_lookups_for_a_region(devices: str) -> None:
    tables = HostEmbeddingCollection({"a": 6, "b": 6}, 2, seed=0)
    region, seen = DataParallel(nn.Identity(), devices), list[int]()
    tables.register_forward_hook(lambda _, __, rows: seen.append(len(rows)))
    region(region.rows(tables, IDS[:, :2]))
    assert seen == [2]


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_forward_derivatives_and_second_ones_pass_through_a_split() -> None:
    ids, found = IDS.reshape(-1), []
    for devices in ("cpu", "cpu*2", "cpu*3"):
        model = LookedUp(devices)
        with forward_ad.dual_level():
            duals = {
                k: forward_ad.make_dual(p.detach(), torch.ones_like(p)) for k, p in model.named_parameters()
            }
            tangent = forward_ad.unpack_dual(functional_call(model, duals, (ids,))).tangent
        seen: list[Tensor] = []

        def note(_: nn.Module, __: object, of: tuple[Tensor, ...], seen: list[Tensor] = seen) -> None:
            seen.extend(of)

        model.table.register_full_backward_hook(note)
        grads = torch.autograd.grad((model(ids) ** 2).sum(), list(model.parameters()), create_graph=True)
        squares = [(each.to_dense() if each.is_sparse else each).square().sum() for each in grads]
        torch.stack(squares).sum().backward()
        second = model.table.weight.grad
        assert tangent is not None
        assert second is not None
        found.append((tangent, second.to_dense(), torch.cat(seen)))
    for split in found[1:]:
        torch.testing.assert_close(split, found[0])


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
        found.append(model.one.settled())
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
        return tables.flat.settled()

    assert torch.equal(trained("meta"), trained("cpu"))
