"""torch.compile of a whole model around its table's lookups and its region's split."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.embedding import HostEmbedding, dense_parameters, row_optimizer
from dphybrid.parallel import DataParallel


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    def __init__(self, devices: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = HostEmbedding(50, 8, seed=1)
        self.region = DataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), devices)
        self.head = nn.Linear(1, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.region.rows(self.table, ids)
        return self.head(self.region(rows) * 2).sum() + self.table(ids).square().sum()


def trained(model: Model, call: Any) -> list[float]:
    rows, dense = (
        row_optimizer("adam", {"table": model.table}, lr=0.1),
        torch.optim.SGD(dense_parameters(model), lr=0.1),
    )
    losses = []
    for number in range(4):
        ids = torch.randint(
            0, 50, (7 if number == 3 else 12,), generator=torch.Generator().manual_seed(number)
        )
        rows.zero_grad()
        dense.zero_grad()
        loss = call(ids).square().mean()
        loss.backward()
        rows.step()
        dense.step()
        losses.append(loss.item())
    return losses


def test_a_whole_model_compiles_around_its_table_and_its_split() -> None:
    expected = trained(model := Model("cpu*2"), model)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    model = Model("cpu*2")
    assert trained(model, torch.compile(model, backend=backend)) == expected
    assert [split.count for split in model.region.splits()] == [3, 1]
    assert any("linear" in graph for graph in graphs), "something is left to compile"
