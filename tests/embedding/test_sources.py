"""A loop with a pipeline draws its batches, and random numbers, as a plain loop does."""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dphybrid.embedding import HostEmbedding, RowPipeline, RowSGD
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
@pytest.mark.parametrize(
    "make", [numbered, lambda: iter(list(numbered())), lambda: map(torch.clone, numbered())]
)
def test_loops_that_are_left_lose_no_batch(
    devices: str, mode: str, make: Callable[[], Iterator[Tensor]]
) -> None:
    model, source, seen = Model(devices), make(), list[int]()
    for _ in range(4):
        loop = ahead(model, mode, source)
        for number, ids in enumerate(loop):
            seen.append(int(ids[0]))
            model(ids).backward()
            if number == 2:
                break
        loop.close()  # type: ignore[attr-defined]
    assert seen == list(range(12))
    assert [int(ids[0]) for ids in ahead(model, mode, source)][:2] == [12, 13]


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


class Drawing(Dataset[Tensor]):
    """Samples that are changed at random, from one of the generators that a process has."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor((index + self.draw()) % 50)


@KINDS
@pytest.mark.parametrize(
    "draw",
    [
        lambda: int(torch.randint(9, ())),
        lambda: random.randrange(9),
        lambda: int(np.random.randint(9)),
        lambda: 0,
    ],
)
@pytest.mark.filterwarnings("ignore:RowPipeline. rows are not fetched ahead. the batches draw:RuntimeWarning")
def test_random_numbers_stay_where_they_were(devices: str, mode: str, draw: Callable[[], int]) -> None:
    def trained(how: str) -> list[object]:
        model, seen = Model(devices), list[object]()
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        rows = RowSGD(model.table, lr=0.1)
        with RowPipeline(model, mode=how, on_cpu=True) as pipeline:
            for _ in range(2):
                loader = DataLoader(Drawing(draw), 4, shuffle=True)
                for ids in pipeline.prefetch(loader, lambda ids: {"table": ids}):
                    loss = model(ids)
                    loss.backward()
                    rows.step()
                    rows.zero_grad()
                    seen += [loss.item(), ids.tolist(), random.random(), np.random.rand()]
        return seen

    assert trained(mode) == trained("off")


def test_a_source_that_draws_random_numbers_is_named() -> None:
    model = Model("cpu*2")
    loop = ahead(model, "exact", (torch.randint(50, (4,)) for _ in range(4)))
    with pytest.warns(RuntimeWarning, match="the batches draw random numbers from a global generator"):
        assert [model(ids) is not None for ids in loop] == [True] * 4


@KINDS
def test_an_exhausted_iterator_is_named(devices: str, mode: str) -> None:
    model, source = Model(devices), numbered()
    assert len([model(ids) for ids in ahead(model, mode, source)]) == 100
    with pytest.warns(RuntimeWarning, match="no batch left; give prefetch a list"):
        assert not list(ahead(model, mode, source))
