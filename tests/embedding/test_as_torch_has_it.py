"""A table under the habits of nn.Embedding: freezing, casting, copying, arguments, and its weight used by
hand, which is never lost in silence."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dphybrid.embedding import HostEmbedding, RowSGD, dense_parameters, look_up_columns

IDS = torch.tensor([1, 2, 2, 7])


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = HostEmbedding(10, 4, seed=1, name="words", **options)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


def freeze_model(model: Model) -> None:
    model.requires_grad_(False)
    model.head.requires_grad_(True)


FREEZE: dict[str, Callable[[Model], Any]] = {
    "table": lambda model: model.table.requires_grad_(False),
    "model": freeze_model,
    "weight": lambda model: model.table.weight.requires_grad_(False),
    "attribute": lambda model: setattr(model.table.weight, "requires_grad", False),
}


@pytest.mark.parametrize("how", FREEZE)
def test_a_frozen_table_is_not_trained(how: str) -> None:
    model = Model()
    rows, dense = RowSGD(model.table, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    before, head = model.table.weight.clone(), model.head.weight.detach().clone()
    FREEZE[how](model)
    assert not model.table.weight.requires_grad
    assert not model.table(IDS).requires_grad
    model(IDS).sum().backward()
    dense.step()
    rows.step()
    assert torch.equal(model.table.weight, before)
    assert not torch.equal(model.head.weight, head)
    model.requires_grad_(True)
    model(IDS).sum().backward()
    rows.step()
    assert not torch.equal(model.table.weight, before)


def test_a_frozen_one_of_several_tables_at_once_is_not_trained() -> None:
    one, two = HostEmbedding(10, 4, seed=1), HostEmbedding(10, 4, seed=2, freeze=True)
    rows = RowSGD({"one": one, "two": two}, lr=0.1)
    before = [one.weight.clone(), two.weight.clone()]
    look_up_columns([one, two], torch.tensor([[1, 2], [3, 4]])).sum().backward()
    rows.step()
    assert not torch.equal(one.weight, before[0])
    assert torch.equal(two.weight, before[1])


def test_pretrained_rows_are_shared_and_frozen() -> None:
    given = torch.randn(5, 3)
    table = HostEmbedding.from_pretrained(given)
    assert table.weight.data_ptr() == given.data_ptr()
    assert (table.num_embeddings, table.embedding_dim) == (5, 3)
    assert not table(IDS[:2]).requires_grad
    trained = HostEmbedding.from_pretrained(given, freeze=False, padding_idx=-1)
    assert trained.padding_idx == 4
    assert trained(IDS[:2]).requires_grad
    with pytest.raises(ValueError, match=r"\(num_rows, dim\)"):
        HostEmbedding.from_pretrained(torch.randn(5))


@pytest.mark.parametrize(
    "option",
    [
        {"max_norm": 1.0},
        {"norm_type": 1.0},
        {"scale_grad_by_freq": True},
        {"sparse": False},
        {"device": "cuda"},
        {"_freeze": True},
    ],
)
def test_arguments_of_embedding_that_a_table_has_not_are_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        HostEmbedding(10, 4, **option)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        HostEmbedding(10, 4, rows=3)


def test_arguments_of_embedding_that_change_nothing_are_taken() -> None:
    table = HostEmbedding(num_embeddings=10, embedding_dim=4, max_norm=None, sparse=True, device="cpu")
    assert torch.equal(table(IDS.int()), table.weight.detach()[IDS])
    with pytest.raises(ValueError, match="each once"):
        HostEmbedding(10, num_embeddings=10, embedding_dim=4)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_come_in_the_type_that_the_model_was_cast_to(kind: torch.dtype) -> None:
    model = Model().to(kind)
    rows = RowSGD(model.table, lr=0.1)
    assert model.table.weight.dtype == torch.float32
    assert model.table(IDS).dtype == kind
    before = model.table.weight.clone()
    model(IDS).sum().backward()
    rows.step()
    expected = before[1] - 0.1 * model.head.weight.detach()[0].float()
    torch.testing.assert_close(model.table.weight.detach()[1], expected)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_in_mid_step_has_rows_of_its_own_and_no_gradients(again: Callable[[Model], Model]) -> None:
    model = Model(padding_idx=3)
    rows = RowSGD(model.table, lr=0.1)
    model(IDS).sum().backward()
    twin = again(model)
    assert twin.table.row_gradients() is None
    rows.step()
    before = twin.table.weight.clone()
    assert not torch.equal(model.table.weight, before)
    own = RowSGD(twin.table, lr=0.1)
    twin.zero_grad()
    twin(IDS).sum().backward()
    own.step()
    assert torch.equal(twin.table.weight, model.table.weight)
    assert not twin.table.weight[3].any()


@pytest.mark.parametrize("averaged", [True, False])
def test_an_averaged_model_averages_or_follows_the_rows(averaged: bool) -> None:
    model = Model()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=averaged)
    rows, expected = RowSGD(model.table, lr=0.1), model.table.weight.clone()
    for step in range(3):
        model.zero_grad()
        model(IDS).sum().backward()
        rows.step()
        ema.update_parameters(model)
        now = model.table.weight.clone()
        expected = now if not averaged or step == 0 else 0.5 * expected + 0.5 * now
    torch.testing.assert_close(ema.module.table.weight.detach(), expected)


def test_what_the_parameters_of_a_model_know_of_a_table() -> None:
    model = Model()
    assert [name for name, _ in model.named_parameters()] == ["table.anchor", "head.weight", "head.bias"]
    assert [p.numel() for p in dense_parameters(model)] == [4, 1]
    assert [name for name, _ in model.named_buffers()] == ["table.weight"]
    assert list(model.state_dict()) == ["table.weight", "head.weight", "head.bias"]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["table.weight"], model.table.weight)


BY_HAND: dict[str, Callable[[Model], Tensor]] = {
    "penalised": lambda model: model(IDS).sum() + model.table.weight.pow(2).sum(),
    "a view penalised": lambda model: model(IDS).sum() + model.table.weight[2:4].T.norm(),
    "tied": lambda model: F.linear(model.table(IDS), model.table.weight).sum(),
    "looked up by hand": lambda model: model.head(F.embedding(IDS, model.table.weight)).sum(),
    "indexed": lambda model: model.head(model.table.weight[IDS]).sum(),
    "converted": lambda model: (model.table(IDS).double() @ model.table.weight.double().T).sum(),
}


@pytest.mark.parametrize("use", BY_HAND)
def test_a_weight_used_by_hand_is_told_when_its_gradient_would_be_lost(use: str) -> None:
    model = Model()
    loss = BY_HAND[use](model)
    with pytest.raises(ValueError, match=r"'words': a gradient reached its weight.*looked-up rows.*detach"):
        loss.backward()
    model.table.requires_grad_(False)  # then none is expected
    if (loss := BY_HAND[use](model)).requires_grad:
        loss.backward()


def test_gradients_of_the_weight_that_autograd_cannot_give_are_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"autograd.grad of its weight; take that of the looked-up rows"):
        torch.autograd.grad(model(IDS).sum(), model.table.weight, create_graph=True, allow_unused=True)
    with pytest.raises(ValueError, match="register_hook of its weight would never be called"):
        model.table.weight.register_hook(print)
    rows = model.table(IDS)  # second derivatives go through looked-up rows
    (grads,) = torch.autograd.grad(rows.pow(3).sum(), rows, create_graph=True)
    grads.sum().backward()
    found = model.table.row_gradients()
    assert found is not None
    torch.testing.assert_close(found[1][0], 6 * model.table.weight.detach()[1])


def test_the_weight_is_looked_at_and_written_as_ever() -> None:
    table = HostEmbedding(10, 4)
    table.weight[3] = 5.0
    table.weight[4].zero_()
    table.weight[5:7].T.mul_(2)
    table.weight += 1
    assert table.weight[3].numpy().tolist() == [6.0] * 4
    assert table.weight[4].tolist() == [1.0] * 4
    assert not table.weight.clone().requires_grad
    assert isinstance(repr(table.weight), str)
    assert type(table.weight.detach()) is Tensor
    table.weight = torch.zeros(10, 4)
    assert not table(IDS).any()
    with pytest.raises(ValueError, match=r"weight = \(3, 4\)"):
        table.weight = torch.zeros(3, 4)


CLIPS: dict[str, Callable[[list[Tensor]], Any]] = {
    "norm": lambda weights: nn.utils.clip_grad_norm_(weights, 0.1),
    "largest": lambda weights: nn.utils.clip_grad_norm_(weights, 0.1, "inf", error_if_nonfinite=True),
    "value": lambda weights: nn.utils.clip_grad_value_(weights, 0.05),
    "alone": lambda weights: nn.utils.clip_grad_norm_(weights[0], 0.1),
}


@pytest.mark.parametrize("how", CLIPS)
def test_torchs_own_clipping_takes_the_weight_of_a_table(how: str) -> None:
    model, table = Model(), nn.Embedding(10, 4)
    table.weight.data.copy_(model.table.weight)
    head = copy.deepcopy(model.head)
    rows = RowSGD(model.table, lr=0.1)
    model(IDS).square().sum().backward()
    head(table(IDS)).square().sum().backward()
    ours = CLIPS[how]([model.table.weight, *model.head.parameters()])
    theirs = CLIPS[how]([table.weight, *head.parameters()])
    assert ours is theirs is None or torch.allclose(ours, theirs)
    torch.testing.assert_close(model.table.weight.grad.to_dense(), table.weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows.step()
    torch.testing.assert_close(model.table.weight.detach(), table.weight.detach() - 0.1 * table.weight.grad)


def test_the_gradient_of_a_weight_is_that_of_a_sparse_embedding_and_torch_may_train_it() -> None:
    ours, theirs = HostEmbedding(10, 4), nn.Embedding(10, 4, sparse=True)
    theirs.weight.data.copy_(ours.weight)
    optimizers = [torch.optim.SparseAdam([t.weight], lr=0.1) for t in (ours, theirs)]
    for _ in range(3):
        for table, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            table(IDS).square().sum().backward()
        assert torch.equal(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours.weight.detach(), theirs.weight.detach())
    ours(IDS).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        torch.optim.Adam([ours.weight]).step()
