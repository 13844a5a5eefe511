"""A table's weight is a parameter of torch's own: what that settles, and what is refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from dphybrid.embedding import (
    HostEmbedding,
    RowOptimizer,
    clip_grad_norm_,
    dense_parameters,
    row_optimizer,
)
from dphybrid.util.errors import UserError


def changed(table: HostEmbedding, before: Tensor) -> list[int]:
    rows: list[int] = (table.weight.detach() != before).any(1).nonzero().squeeze(1).tolist()
    return rows


def trained(table: HostEmbedding, lr: float = 1.0) -> tuple[RowOptimizer, Tensor]:
    return row_optimizer("sgd", table, lr=lr), table.weight.detach().clone()


def test_a_refilled_buffer_of_ids_reaches_no_memory() -> None:
    table = HostEmbedding(8, 4)
    rows, before = trained(table)
    ids = torch.tensor([1, 2])
    table(ids).sum().backward()
    ids.copy_(torch.tensor([5, 6]))
    table(ids).sum().backward()
    ids.fill_(9)
    rows.step()
    assert changed(table, before) == [1, 2, 5, 6]


def test_whoever_replaces_the_weight_has_its_rows_looked_up() -> None:
    model, ids = nn.Sequential(HostEmbedding(8, 4)), torch.tensor([3])
    ones = torch.ones(8, 4)
    assert torch.equal(torch.func.functional_call(model, {"0.weight": ones}, (ids,)), ones[:1])
    table = model[0]
    with torch.no_grad():
        table.weight.set_(2 * ones)
    assert torch.equal(table(ids), 2 * ones[:1])
    table.weight = nn.Parameter(3 * ones)
    assert torch.equal(table(ids), 3 * ones[:1])
    short = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(UserError, match="rows are 0 to 2"):
        torch.func.functional_call(model, {"0.weight": short}, (ids,))


def test_a_lookup_in_graphs_is_that_of_torch() -> None:
    with torch.device("meta"):
        assert HostEmbedding(1000, 8).weight.device.type == "cpu"
    model, ids = nn.Sequential(HostEmbedding(10, 4, 2), nn.Linear(4, 1)), torch.tensor([1, 2])
    other = torch.tensor([3, 4])
    wanted = model(other)
    assert torch.equal(torch.export.export(model, (ids,)).module()(other), wanted)
    assert torch.equal(torch.jit.trace(model, (ids,))(other), wanted)
    assert torch.equal(make_fx(model)(ids)(other), wanted)
    with FlopCounterMode(display=False):
        model(ids).sum().backward()
    assert model[0].weight.grad.coalesce().to_dense().any(1).nonzero().tolist() == [[1]]


def test_what_is_fetched_ahead_holds_ids_of_its_own() -> None:
    table, ids = HostEmbedding(8, 4), torch.tensor([1, 2])
    table.place_on([torch.device("cpu")] * 2, lambda rows: [rows // 2, rows - rows // 2])
    table.ahead.expect([table.ahead.prepare(table.weight, ids)])
    ids[0] = 7
    assert torch.equal(torch.cat(table.replica_rows(ids)), table.weight.detach()[[7, 2]])


def test_a_clipped_gradient_is_clipped_once() -> None:
    table, ids = HostEmbedding(8, 4), torch.tensor([1])
    grads = torch.ones(1, 4)
    table(ids).backward(grads)
    assert float(clip_grad_norm_(table.parameters(), 1.0)) == pytest.approx(2.0)
    table(ids).backward(grads)
    grad = table.weight.grad.coalesce()
    torch.testing.assert_close(grad.values(), torch.full((1, 4), 1.5), rtol=0, atol=1e-5)


def test_state_and_groups_are_read_in_each_step() -> None:
    table, ids = HostEmbedding(8, 4), torch.tensor([1])
    rows = row_optimizer("adagrad", table, lr=1.0)
    table(ids).backward(torch.ones(1, 4))
    for _ in range(2):
        before = table.weight.detach().clone()
        rows.state.clear()
        rows.step()
        torch.testing.assert_close(before[1] - table.weight.detach()[1], torch.ones(4))
    assert rows.state[table.weight]["sum"][1] == 1
    rows.param_groups.clear()
    before = table.weight.detach().clone()
    rows.step()
    assert not changed(table, before)


def test_torchs_dense_optimizers_refuse_tables_and_its_sparse_ones_train_them() -> None:
    model = nn.Sequential(HostEmbedding(8, 4), nn.Linear(4, 1))
    assert len(list(model.parameters())) == 3
    assert [p.shape for p in dense_parameters(model)] == [(1, 4), (1,)]
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        torch.optim.Adam(model.parameters()).step()
    before = model[0].weight.detach().clone()
    torch.optim.SparseAdam([model[0].weight]).step()
    assert changed(model[0], before) == [1]


def test_a_weight_used_as_a_whole_trains_all_rows() -> None:
    table, plain = HostEmbedding(8, 4, dtype=torch.float64), nn.Embedding(8, 4, dtype=torch.float64)
    plain.weight.data.copy_(table.weight)
    rows, other = (
        row_optimizer("sgd", table, lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    for embedding, optimizer in ((table, rows), (plain, other)):
        hidden = embedding(torch.tensor([1, 2, 1]))
        (
            nn.functional.linear(hidden, embedding.weight).sin().sum() + embedding.weight.square().sum()
        ).backward()
        optimizer.step()
    torch.testing.assert_close(table.weight, plain.weight, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        lambda table: prune.l1_unstructured(table, "weight", 0.5),
    ],
)
def test_a_computed_weight_is_refused(change: Callable[[nn.Module], nn.Module]) -> None:
    table = HostEmbedding(8, 4)
    with pytest.raises(UserError, match="'table': its weight is computed from other parameters"):
        change(table)(torch.tensor([1, 2, 1]))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_ids_are_refused_by_name(layout: torch.layout) -> None:
    parts = [torch.tensor([1, 2]), torch.tensor([3])]
    nested, table = torch.nested.nested_tensor(parts, layout=layout), HostEmbedding(8, 4)
    with pytest.raises(UserError, match=r"'table': ids are a nested or sparse tensor; give ids.values\(\)"):
        table(nested)
    with pytest.raises(UserError, match=r"'table': ids are of type list; give torch.as_tensor\(ids\)"):
        table([1, 2])


def test_betas_without_a_correction_are_refused_whenever_they_are_set() -> None:
    table = HostEmbedding(8, 4)
    for betas in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9)):
        with pytest.raises(UserError, match="betas"):
            row_optimizer("adam", table, betas=betas)
    rows, before = row_optimizer("adam", table), table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    rows.param_groups[0]["betas"] = (1.0, 0.999)
    with pytest.raises(UserError, match=r"betas=\(1.0, 0.999\)"):
        rows.step()
    assert not changed(table, before)


def test_torchs_own_uses_of_a_parameter_work() -> None:
    table, ids = HostEmbedding(8, 4), torch.tensor([1, 2])
    rows = table(ids)
    rows += 1.0
    torch.relu_(rows)
    (grad,) = torch.autograd.grad(table(ids).sum(), table.weight)
    assert grad.is_sparse
    seen: list[int] = []
    table.weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    table(ids).sum().backward(inputs=[table.weight])
    assert seen == [1]
    table.weight.requires_grad_(False)
    assert not table(ids).requires_grad
    AveragedModel(nn.Sequential(table)).update_parameters(nn.Sequential(table))
