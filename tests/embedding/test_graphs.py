"""Gradients of several lookups belong to the graph that makes them, and tables follow what torch's users do
to an nn.Embedding: initial values, sharing, a longer weight, forks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from dphybrid.embedding import (
    HostEmbedding,
    row_optimizer,
)
from dphybrid.parallel import DataParallel
from dphybrid.util.errors import UserError

ROWS = 9


def pair(dim: int = 3) -> tuple[HostEmbedding, nn.Embedding]:
    """A table and an nn.Embedding with the same rows."""
    table = HostEmbedding(ROWS, dim, dtype=torch.float64)
    return table, nn.Embedding(ROWS, dim, _weight=table.weight.detach().clone())


def two_lookups(embedding: nn.Module) -> tuple[Tensor, Tensor]:
    return embedding(torch.tensor([1, 2, 2])), embedding(torch.tensor([3, 2, 1]))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise MemoryError


def by_the_rows_of_the_first(embedding: nn.Module) -> None:
    users, items = two_lookups(embedding)
    loss = (users * items).sin().sum()
    for rows in (users, items):
        torch.autograd.grad(loss, rows, retain_graph=True)
    loss.backward()


def twice(embedding: nn.Module) -> None:
    users, items = two_lookups(embedding)
    (users * items).sum().backward(retain_graph=True)
    (users + items).sin().sum().backward()


def after_an_error(embedding: Any) -> None:
    users, items = two_lookups(embedding)
    with pytest.raises(MemoryError):
        (Fails.apply(users).sum() + items.sum()).backward()
    embedding.weight.grad = None
    embedding(torch.tensor([5])).sin().sum().backward()


def one_of_two_graphs(embedding: nn.Module) -> None:
    users, items = two_lookups(embedding)
    other = embedding(torch.tensor([4]))
    (users * items).sum().backward()
    other.sin().sum().backward()


@pytest.mark.parametrize("use", [by_the_rows_of_the_first, twice, after_an_error, one_of_two_graphs])
def test_gradients_stay_in_their_graph(use: Callable[[nn.Module], None]) -> None:
    table, plain = pair()
    for embedding in (table, plain):
        use(embedding)
    torch.testing.assert_close(table.weight.grad.to_dense(), plain.weight.grad, rtol=0, atol=1e-12)


def test_threads_that_share_a_table_get_their_own_gradients() -> None:
    def gradient(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        users, items = (table(torch.randint(0, ROWS, (5,), generator=generator)) for _ in range(2))
        (grad,) = torch.autograd.grad((users * items).sum(), table.weight)
        return grad.to_dense()

    table, _ = pair()
    expected = [gradient(seed) for seed in range(200)]
    with ThreadPoolExecutor(4) as pool:
        for seed, found in enumerate(pool.map(gradient, range(200))):
            assert torch.equal(found, expected[seed]), seed


def test_start_values_follow_torch_s_seed() -> None:
    def made() -> list[Tensor]:
        torch.manual_seed(3)
        tables = [
            HostEmbedding(100, 4),
            HostEmbedding(300, 4),
            HostEmbedding(100, 4),
        ]
        return [table.weight.detach() for table in tables]

    first, again = made(), made()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1][:100])
    assert not torch.equal(first[0], first[2])
    assert torch.equal(HostEmbedding(50, 4, seed=5).weight, HostEmbedding(50, 4, seed=5).weight)


def test_a_table_has_torch_s_default_type() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(HostEmbedding(9, 4), DataParallel(nn.Linear(4, 1), "cpu*2"))
        rows = row_optimizer("adam", model, lr=0.1)
        model(torch.tensor([1, 2, 1])).sum().backward()
        rows.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert model[0].weight.dtype == torch.float64


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_a_longer_weight_has_the_padding_of_its_table(rule: str) -> None:
    table = HostEmbedding(ROWS, 3, padding_idx=8, dtype=torch.float64)
    grown = torch.cat([table.weight.detach(), torch.ones(4, 3, dtype=torch.float64)])
    table.weight = nn.Parameter(grown)
    assert (table.num_rows, table.num_embeddings, len(table(torch.tensor([12])))) == (13, 13, 1)
    rows, before = row_optimizer(rule, table, lr=0.1), grown.clone()
    table(torch.tensor([8, 12])).sum().backward()
    rows.step()
    assert (table.weight.detach() != before).any(1).nonzero().flatten().tolist() == [12]


def test_states_of_a_weight_that_grew_in_place_are_refused() -> None:
    table = HostEmbedding(9, 3)
    rows = row_optimizer("adam", table, lr=0.1)
    table.weight.data = torch.ones(12, 3)
    table(torch.tensor([11])).sum().backward()
    with pytest.raises(UserError, match=r"a weight of 12 rows has the state 'mean' of shape \(9, 3\)"):
        rows.step()


def test_processes_do_not_share_a_table() -> None:
    table = HostEmbedding(4, 2, name="words")
    with pytest.raises(UserError, match="'words': processes cannot share it"):
        nn.Sequential(table).share_memory()
    process = multiprocessing.get_context("spawn").Process(target=len, args=(table,))
    with pytest.raises(UserError, match="'words': processes cannot share it"):
        process.start()


def trained_after_a_fork(table: HostEmbedding) -> None:
    torch.set_num_threads(2)  # as a careless data set would
    rows = table(torch.arange(20_000) % 1000)
    torch.set_num_threads(1)
    total = rows.sum()
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError:  # torch refuses any backward, if the parent's have used threads for devices
        return
    total.backward()
    row_optimizer("adagrad", table, lr=0.1).step()
    HostEmbedding(20_000, 32)


def test_a_process_forked_after_use_does_not_hang() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        table = HostEmbedding(20_000, 32)
        table(torch.arange(20_000) % 1000).sum().backward()
        process = multiprocessing.get_context("fork").Process(target=trained_after_a_fork, args=(table,))
        process.start()
        process.join(60)
    finally:
        torch.set_num_threads(before)
        process.kill()
    assert process.exitcode == 0
