"""The compiled kernels beside the same formulas in torch, for any number of threads, types, widths and
tables."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.config import TableConfig
from dphybrid.embedding import HostEmbedding, row_optimizer
from dphybrid.embedding.storage import StartValues
from dphybrid.kernels import RULE_NUMBERS
from dphybrid.util.row_rules import RULES


def test_config_optimizers_and_kernels_follow_one_table_of_rules() -> None:
    choices = TableConfig.model_json_schema()["properties"]["optimizer"]["enum"]
    assert ["auto", *RULES] == choices
    assert list(RULES) == list(RULE_NUMBERS)


class RowWise(torch.optim.Optimizer):
    """Adagrad, or with betas Adam, with one second moment for a parameter, in torch's own operations."""

    def __init__(
        self, rows: list[nn.Parameter], lr: float, weight_decay: float, betas: tuple[float, float] = (0, 0)
    ) -> None:
        super().__init__(rows, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        for row in group["params"]:
            if row.grad is None:
                continue
            grad, state = row.grad + group["weight_decay"] * row, self.state[row]
            mean_square = grad.square().mean()
            if beta1:
                step = state["step"] = state.get("step", 0) + 1
                mean = state["mean"] = state.get("mean", 0 * grad).lerp(grad, 1 - beta1)
                square = state["square"] = beta2 * state.get("square", 0) + (1 - beta2) * mean_square
                size = (square / (1 - beta2**step)).sqrt() + 1e-8
                row -= group["lr"] * mean / (1 - beta1**step) / size
            else:
                state["sum"] = state.get("sum", 0) + mean_square
                row -= group["lr"] * grad / (state["sum"].sqrt() + 1e-10)


REFERENCES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": RowWise,
    "lazy-adagrad": torch.optim.Adagrad,
    "adam": RowWise,
    "lazy-adam": torch.optim.Adam,
}
"""adamw is compared in test_host_embedding.py."""


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 7), (torch.float32, 80), (torch.float64, 40)])
@pytest.mark.parametrize("kind", REFERENCES)
def test_steps_are_those_of_an_optimizer_with_a_parameter_a_row(
    kind: str, dtype: torch.dtype, dim: int
) -> None:
    steps = 16 if dtype == torch.float64 else 4  # 1 - 0.05 ** k is 1 from k = 13 on
    options: dict[str, Any] = {"betas": (0.05, 0.999)} if "adam" in kind else {}
    table = HostEmbedding(20, dim, dtype=dtype, padding_idx=3, seed=1)
    optimizer = row_optimizer(kind, {"t": table}, lr=0.1, weight_decay=0.02, **options)
    rows = [nn.Parameter(row.double()) for row in table.weight.detach().clone()]
    reference = REFERENCES[kind](rows, lr=0.1, weight_decay=0.02, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 15, (20,), generator=generator)
        grads = torch.randn(20, dim, generator=generator, dtype=dtype)
        optimizer.zero_grad()
        table(ids).backward(grads)
        optimizer.step()
        summed = torch.zeros(20, dim, dtype=torch.float64).index_add_(0, ids, grads.double())
        touched = set(ids.tolist()) - {3}
        for number, row in enumerate(rows):
            row.grad = summed[number] if number in touched else None
        reference.step()
    tolerance = 3e-6 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(table.weight.double(), torch.stack(rows), rtol=tolerance, atol=tolerance)


@contextmanager
def threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def test_start_values_are_normal_and_depend_on_seed_and_place_alone() -> None:
    def drawn(rows: int, dtype: torch.dtype = torch.float32, seed: int = 3, count: int = 1) -> Tensor:
        with threads(count):
            return HostEmbedding(rows, 18, std=0.5, dtype=dtype, seed=seed).weight

    whole = drawn(20_000)
    for rows, count in ((1, 1), (7001, 1), (20_000, 2), (20_000, 3)):
        assert torch.equal(drawn(rows, count=count), whole[:rows])
    for first, last in ((0, 1), (7, 9), (3, 20_000), (19_999, 20_000)):
        part = torch.empty(last - first, 18)
        StartValues(0.5, 3).write(part, first)
        assert torch.equal(part, whole[first:last])
    assert torch.equal(drawn(999, torch.bfloat16), whole[:999].bfloat16())
    assert torch.equal(drawn(999, torch.float64), drawn(2000, torch.float64)[:999])
    assert (drawn(999, seed=4) != whole[:999]).float().mean() > 0.999
    assert len(whole.unique(dim=0)) == 20_000
    sorted_N = whole.double().flatten().sort().values
    share_N = torch.arange(1, len(sorted_N) + 1) / len(sorted_N)  # Kolmogorov and Smirnov's test, 0.1 %
    assert (torch.special.ndtr(sorted_N / 0.5) - share_N).abs().max() < 1.95 / math.sqrt(len(sorted_N))
    assert 2.2 < float(sorted_N[-1]) < 2.8
    for one, other in ((whole[:-1], whole[1:]), (whole[:, :-1], whole[:, 1:])):
        assert abs(float((one * other).mean() / 0.25)) < 4 / math.sqrt(one.numel())


def test_rounding_depends_on_step_row_and_column_alone() -> None:
    def step_of(ids: Tensor) -> Tensor:
        table = HostEmbedding(3000, 64, std=0.0, dtype=torch.bfloat16, seed=0)
        table.weight.detach().fill_(1.0)
        rows = row_optimizer("sgd", {"t": table}, lr=1e-3)
        table(ids).sum().backward()
        rows.step()
        return table.weight

    all_rows, some = step_of(torch.arange(3000)), step_of(torch.tensor([7, 2999, 4]))
    assert torch.equal(all_rows[[7, 2999, 4]], some[[7, 2999, 4]])
    lower = (all_rows < 1).float()  # 1e-3 of the 1 / 256 below 1: a quarter goes down
    assert float(lower.mean()) == pytest.approx(0.256, abs=0.004)
    spread = math.sqrt(0.256 * 0.744)
    assert float(lower.mean(0).std()) == pytest.approx(spread / math.sqrt(3000), rel=0.4)
    assert float(lower.mean(1).std()) == pytest.approx(spread / math.sqrt(64), rel=0.2)
