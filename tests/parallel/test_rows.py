"""`rows = net.rows(table, ids)`: each replica gets its share's rows, all of them fetched ahead by
`RowPipeline`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.embedding import HostEmbedding, RowPipeline, row_optimizer
from dphybrid.parallel import DataParallel, Parts, Whole, parts
from dphybrid.util.errors import UserError

BATCHES = [
    torch.randint(0, 60, (rows, 2), generator=torch.Generator().manual_seed(rows)) for rows in (9, 8, 7, 9)
]


class Looks(nn.Module):
    """Two ids a sample into one number."""

    def __init__(self, devices: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = HostEmbedding(60, 4, seed=1)
        self.net = DataParallel(nn.Sequential(nn.Flatten(), nn.Linear(8, 1)), devices)

    def forward(self, ids_B2: Tensor) -> Tensor:
        out: Tensor = self.net(self.net.rows(self.table, ids_B2))
        return out


def train(
    model: nn.Module,
    ids_of: Callable[[Tensor], Any],
    epochs: int = 1,
    **options: Any,
) -> dict[str, float]:
    """Train by SGD; return the pipeline's counters."""
    rows = row_optimizer("sgd", model, lr=0.1)
    dense = torch.optim.SGD(model.net.parameters(), lr=0.1)  # type: ignore[union-attr]
    with RowPipeline(model, **options) as pipeline:
        for _ in range(epochs):
            for batch in pipeline.prefetch(BATCHES, ids_of):
                dense.zero_grad()
                rows.zero_grad()
                model(batch).square().mean().backward()
                dense.step()
                rows.step()
        return pipeline.counters()


def announced(ids_B2: Tensor) -> dict[str, Tensor]:
    return {"table": ids_B2}


def unique(batch: Tensor, shares: int) -> int:
    return sum(len(share.unique()) for share in batch.chunk(shares))


def test_all_rows_but_those_of_the_first_batch_come_prepared() -> None:
    counted = train(Looks("cpu*3"), announced, on_cpu=True, epochs=2)
    each = [unique(batch, 3) for batch in BATCHES]
    assert counted["unique"] == 2 * sum(each)
    assert counted["prepared"] == 2 * sum(each[1:])


def test_slips_of_a_call_are_told_by_name() -> None:
    model = Looks("cpu*2")
    with pytest.raises(UserError, match="table 'table': one id, 3, cannot be split"):
        model.net.rows(model.table, torch.tensor(3))
    with pytest.raises(UserError, match=r"ids of a Tensor; return \{table name: ids\}"):
        train(model, lambda ids: ids, on_cpu=True)
    with pytest.raises(UserError, match="row optimizer 'Adam': use one of sgd, adagrad"):
        row_optimizer("Adam", model.table)


def test_a_table_of_two_regions_delivers_to_both_or_is_refused() -> None:
    table, ids = HostEmbedding(60, 4, seed=0), BATCHES[0]
    one, alike = (DataParallel(nn.Identity(), "cpu*2") for _ in range(2))
    for region in (one, alike, one):
        torch.testing.assert_close(region(region.rows(table, ids)), table(ids))
    other = DataParallel(nn.Identity(), "cpu*3")
    with pytest.raises(
        UserError, match=r"rows go to cpu\*2 already, for another region, and this one is on cpu\*3"
    ):
        other.rows(table, ids)
    del one, region
    torch.testing.assert_close(other(other.rows(table, ids)), table(ids))  # that region is gone


def test_rows_in_parts_are_for_regions() -> None:
    table, region = HostEmbedding(60, 4, seed=0), DataParallel(nn.Identity(), "cpu*2")
    rows = region.rows(table, BATCHES[0])
    assert isinstance(rows, Parts)
    with pytest.raises(UserError, match="rows are split on dim 0, and this region splits on dim 1"):
        DataParallel(nn.Identity(), "cpu*2", dim=1).rows(table, BATCHES[0])


def test_rows_for_all_replicas() -> None:
    class Scores(nn.Module):
        def forward(self, own_BD: Tensor, *, all_KD: Tensor) -> Tensor:
            return own_BD @ all_KD.T

    table, ids = HostEmbedding(60, 4, seed=0), torch.arange(7)
    region = DataParallel(Scores(), "cpu*3")
    with torch.no_grad():
        scores = region(region.rows(table, ids), all_KD=Whole(region.rows(table, ids)))
    torch.testing.assert_close(scores, table(ids) @ table(ids).T)
    before, optimizer = table.weight.detach().clone(), row_optimizer("sgd", {"t": table}, lr=1.0)
    region(region.rows(table, ids), all_KD=Whole(region.rows(table, ids))).sum().backward()
    optimizer.step()
    torch.testing.assert_close((before - table.weight)[:7], (2 * before[:7].sum(0)).expand(7, 4))


def test_rows_stay_in_their_parts_once_the_region_knows_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    region = DataParallel(nn.Bilinear(3, 3, 2), "cpu*3")
    inputs = parts(torch.randn(6, 3).split(2)), torch.randn(6, 3)
    region(*inputs)
    monkeypatch.setattr(Parts, "joined", lambda *_: pytest.fail("all rows were copied to one device"))
    region(*inputs)


def test_parts_and_whole_tensors_go_together() -> None:
    region = DataParallel(nn.Bilinear(3, 3, 2), "cpu*3")
    left, right = torch.randn(7, 3), torch.randn(7, 3)
    leaves = [part.clone().requires_grad_() for part in left.split(region.sizes(7))]
    torch.testing.assert_close(region(parts(leaves), right), region.module(left, right))
    region(parts(leaves), right).sum().backward()
    expected = torch.autograd.grad(region.module(whole := left.clone().requires_grad_(), right).sum(), whole)[
        0
    ]
    torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]), expected)
