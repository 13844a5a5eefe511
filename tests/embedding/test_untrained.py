"""A table that nothing trains says so, once, and keeps no gradients."""

import warnings

import pytest
import torch

from dphybrid.embedding import HostEmbedding, find_tables, make_row_optimizer
from dphybrid.parallel import DataParallel


class Model(torch.nn.Module):
    def __init__(self, devices: str) -> None:
        super().__init__()
        self.table = HostEmbedding(100, 4, name="films")
        self.region = DataParallel(torch.nn.Linear(4, 1), devices)

    def forward(self, ids_B: torch.Tensor) -> torch.Tensor:
        return self.region(self.table(ids_B)).squeeze(1)


def steps(model: Model, count: int, rows: object = None) -> None:
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(count):
        dense.zero_grad()
        model(torch.arange(number, number + 8)).square().mean().backward()
        dense.step()


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_a_loop_without_a_row_optimizer_is_warned_once_and_keeps_nothing(devices: str) -> None:
    model = Model(devices)
    before = model.table.weight.clone()
    with pytest.warns(UserWarning, match=r"table 'films'.*make_row_optimizer.*rows.step") as told:
        steps(model, 6)
    assert len(told) == 1
    assert torch.equal(model.table.weight, before)
    assert len(model.table.gradients._lookups) == 1  # the last step's alone


def test_no_warning_where_rows_are_trained_or_only_looked_at() -> None:
    model = Model("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            for _ in range(3):
                model(torch.arange(8))
        tables = find_tables(model)
        rows = make_row_optimizer("adagrad", tables, lr=0.1)
        for number in range(4):
            rows.zero_grad()
            for part in range(2):  # two backwards a step add up
                model(torch.arange(number + part, number + part + 8)).square().mean().backward()
            rows.step()


def test_several_lookups_before_one_backward_belong_together() -> None:
    model = Model("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(torch.arange(8)) + model(torch.arange(8, 16))).sum().backward()
    ids_U, _ = model.table.row_gradients()
    assert ids_U.tolist() == list(range(16))
