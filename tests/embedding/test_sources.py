"""A loop with a pipeline draws its batches as a plain loop does."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.embedding import HostEmbedding, RowPipeline
from dphybrid.parallel import DataParallel

KINDS = pytest.mark.parametrize(
    ("devices", "mode"),
    [(devices, mode) for devices in ("cpu", "cpu*2", "cpu*3") for mode in ("off", "exact")],
)


class Model(nn.Module):
    def __init__(self, devices: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = HostEmbedding(50, 4, seed=1)
        self.net = DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)), devices)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.net(self.net.rows(self.table, ids)).square().mean()
        return loss


def ahead(model: Model, mode: str, source: Iterable[Tensor]) -> Iterator[Tensor]:
    """The batches by a new pipeline, which is closed when the loop ends."""
    with RowPipeline(model, mode=mode, on_cpu=True) as pipeline:
        yield from pipeline.prefetch(source, lambda ids: {"table": ids})


def numbered() -> Iterator[Tensor]:
    yield from (torch.tensor([n % 50, 7 * n % 50, n % 3]) for n in range(100))


@KINDS
def test_a_list_starts_anew_in_each_loop(devices: str, mode: str) -> None:
    model, batches, seen = Model(devices), list(numbered())[:5], list[int]()
    for _ in range(2):
        for ids in ahead(model, mode, batches):
            seen.append(int(ids[0]))
            model(ids)
            if len(seen) == 3:
                break
    assert seen == [0, 1, 2, 0, 1, 2, 3, 4]


@KINDS
@pytest.mark.parametrize("numpy", [False, True])
def test_a_source_may_refill_its_memory(devices: str, mode: str, numpy: bool) -> None:
    model, buffer, seen = Model(devices), torch.zeros(3, dtype=torch.int64), list[list[int]]()

    def refilled() -> Iterator[dict[str, Any]]:
        for ids in numbered():
            yield {"ids": buffer.copy_(ids), "same": buffer.numpy() if numpy else buffer}

    with RowPipeline(model, mode=mode, on_cpu=True) as pipeline:
        for number, batch in enumerate(pipeline.prefetch(refilled(), lambda batch: {"table": batch["ids"]})):
            model(batch["ids"])
            pause()
            seen += [batch["ids"].tolist(), batch["same"].tolist()]
            if number == 8:
                break
    assert seen == [ids.tolist() for ids in list(numbered())[:9] for _ in range(2)]


def pause() -> None:
    """Give a worker the time to draw the next batch."""
    time.sleep(0.005)
