"""Products, steps and predictions have the same bits wherever in memory their inputs lie."""

import pytest
import torch
from torch import Tensor, nn

from dphybrid.embedding import HostEmbedding, RowPipeline, dense_parameters, row_optimizer
from dphybrid.parallel import DataParallel
from dphybrid.recipes.ctr.model import DLRM, Sizes
from dphybrid.recipes.ctr.numbers import EmbeddedBins, OnNumbers
from tests.shifting import shift_parameters, shifted


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 4), (torch.float32, 8), (torch.float64, 8)])
@pytest.mark.parametrize("sizes", [(2, 5, 20), (16, 7, 20), (600, 40, 64), (100, 64, 1), (128, 754, 128)])
def test_a_product(sizes: tuple[int, int, int], dtype: torch.dtype, shift: int) -> None:
    rows, inputs, outputs = sizes
    x, weight, bias = (torch.randn(s, dtype=dtype) for s in ((rows, inputs), (outputs, inputs), (outputs,)))
    wanted = nn.functional.linear(shifted(x, 0), shifted(weight, 0), bias)
    assert torch.equal(nn.functional.linear(shifted(x, shift), shifted(weight, 0), bias), wanted)
    assert torch.equal(nn.functional.linear(shifted(x, 0), shifted(weight, shift), bias), wanted)


class Clicks(nn.Module):
    def __init__(self, devices: str) -> None:
        super().__init__()
        self.table = HostEmbedding(40, 5, seed=0)
        numbers = EmbeddedBins(torch.linspace(-2, 2, 9).repeat(3, 1), 4)
        self.region = DataParallel(OnNumbers(DLRM(Sizes(6, 5, 15, 20, 2, 0.0)), numbers), devices)

    def table_ids(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"table": batch[0]}

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.region(self.region.rows(self.table, batch[0]), batch[1])


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
@pytest.mark.parametrize("mode", ["off", "exact"])
def test_losses_of_training_and_predictions(devices: str, mode: str) -> None:
    found = []
    for shift in (0, 4, 8):
        torch.manual_seed(0)
        model = Clicks(devices)
        shift_parameters(model.region, shift)
        dense = torch.optim.SGD(dense_parameters(model), lr=0.1)
        rows = row_optimizer("adagrad", model, lr=0.1)
        batches = [(torch.randint(40, (17, 6)), shifted(torch.randn(17, 3), shift)) for _ in range(6)]
        losses = []
        with RowPipeline(model, mode=mode, on_cpu=True) as pipeline:
            for batch in pipeline.prefetch(batches, model.table_ids):
                loss = model(batch).square().mean()
                loss.backward()
                for optimizer in (dense, rows):
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
        with torch.no_grad():
            found.append([torch.stack(losses), *(model.eval()(batch) for batch in batches)])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
