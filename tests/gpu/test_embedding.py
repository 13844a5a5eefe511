"""What the engine must show on real GPUs: the same bits with and without prefetching while naps on the
streams widen every window for a race, each planted race noticed, the CPU's numbers, and copies that are told.
Without a GPU these tests run on virtual devices, where only a left-out repair can be planted."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dphybrid.embedding import RowPipeline, clip_grad_norm_, row_optimizer
from dphybrid.embedding.ahead import Lookup, LookupsAhead
from dphybrid.embedding.table import HostEmbedding
from dphybrid.parallel import DataParallel, parts
from dphybrid.util.row_rules import RULES
from tests.gpu.places import ALL, CUDA, ONE, SEVERAL

needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")

ROWS, DIM, BATCH, COLUMNS = 5000, 16, 64, 8
STEPS = 200 if CUDA else 24
NAP_CYCLES = 5_000_000
"""About 3 ms of a GPU."""

NAPS = {"to": "_start_copy.record", "back": "start_receiving.wait_stream", "default": "arrive.record_stream"}
"""Which stream naps (rows' way to the device, gradients' way back, computation) at which FUNCTION.METHOD."""

PLANTED = {
    "arrive.wait_event": "to",
    "mend.record": "to",
    "start_receiving.wait_stream": "default",
    "start_receiving.record": "back",
    "_wait.synchronize": "back",
}
"""Synchronisations that are left out, and the nap that makes it count."""


def same_bits(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


class NeverRepaired(LookupsAhead):
    def repair(self, lookup: Lookup) -> None:
        return


class Unmended(HostEmbedding):
    """What a pipeline without the repair would be."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.ahead = NeverRepaired(self.name, self.counters)


class Plant:
    """Puts naps into streams, and leaves out one synchronisation, by the names of `FUNCTION.METHOD`."""

    def __init__(self, patch: pytest.MonkeyPatch, naps: tuple[str, ...], left_out: str = "") -> None:
        self.naps, self.left_out, self.left = {NAPS[nap] for nap in naps}, left_out, 0
        event, stream = torch.cuda.Event, torch.cuda.Stream
        owners = (event, "record"), (event, "synchronize"), (stream, "wait_event"), (stream, "wait_stream")
        for owner, name in (*owners, (torch.Tensor, "record_stream")):
            patch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            place = f"{sys._getframe(1).f_code.co_name}.{name}"
            streams = [each for each in args if isinstance(each, torch.cuda.Stream)]
            self._nap(place, streams)
            done = None
            if place == self.left_out:
                self.left += 1
            else:
                done = call(*args, **options)
            self._nap(place, streams)  # what follows in the stream comes late, too
            return done

        return watched

    def _nap(self, place: str, streams: list[torch.cuda.Stream]) -> None:
        if place in self.naps:
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(NAP_CYCLES)  # type: ignore[no-untyped-call]


def batches() -> list[torch.Tensor]:
    found = []
    for step in range(STEPS):
        chance = torch.rand(
            BATCH - step % 3, COLUMNS, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        found.append(((ROWS**-0.05 * chance + 1 - chance) ** -20).long().clamp_(1, ROWS) - 1)
    return found


def train(
    mode: str,
    devices: str,
    optimizer: str = "adagrad",
    kind: type[HostEmbedding] = HostEmbedding,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], dict[str, float]]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(1), nn.Linear(COLUMNS * DIM, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)
    region = DataParallel(layers, devices)
    table = kind(ROWS, DIM, seed=1, dtype=dtype)
    table.place_on(region.devices.replicas, region.sizes)
    rows = row_optimizer(optimizer, {"t": table}, lr=0.05)
    dense = torch.optim.SGD(region.parameters(), lr=0.01)
    losses: list[torch.Tensor] = []
    with RowPipeline({"t": table}, mode=mode, on_cpu=True) as pipeline:
        for step, ids_BF in enumerate(pipeline.prefetch(batches(), lambda ids: {"t": ids})):
            dense.zero_grad()
            rows.zero_grad()
            loss = (region(parts(table.replica_rows(ids_BF))) - 1).square().mean()
            loss.backward()
            clip_grad_norm_([*region.parameters(), table.weight], 0.5)
            dense.step()
            rows.step()
            losses.append(loss.detach().cpu())
            if step == STEPS // 2:
                with torch.no_grad():
                    losses.append(region(parts(table.replica_rows(ids_BF))).sum().cpu())
        if CUDA:
            torch.cuda.synchronize()
        counters = pipeline.counters()
    tensors = [
        *losses,
        table.weight,
        *rows.states().values(),
        *(p.detach().cpu() for p in region.parameters()),
    ]
    return tensors, counters


# Without a GPU, tests/embedding/test_programs.py shows it for all optimizers.
@pytest.mark.parametrize("optimizer", RULES if CUDA else ["adagrad"])
@pytest.mark.parametrize("devices", [ONE, SEVERAL, ALL])
def test_same_bits_as_without(devices: str, optimizer: str) -> None:
    assert same_bits(train("off", devices, optimizer)[0], train("exact", devices, optimizer)[0])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("naps", [(), ("to",), ("back",), ("default",), ("to", "back", "default")])
def test_naps_on_streams_change_no_bit(naps: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train("off", ONE)[0]
    Plant(monkeypatch, naps)
    assert same_bits(plain, train("exact", ONE)[0])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("left_out", PLANTED)
def test_a_planted_race_is_noticed(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train("off", ONE)[0]
    plant = Plant(monkeypatch, (PLANTED[left_out],), left_out)
    found = train("exact", ONE)[0]
    assert plant.left > 0
    assert not same_bits(plain, found)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("left_out", ["", "arrive.record_stream"])
def test_memory_of_rows_is_reused_only_after_they_were_read(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = HostEmbedding(ROWS, DIM, seed=0)
    table.place_on([torch.device(ONE)], lambda rows: [rows])
    Plant(monkeypatch, ("default",), left_out)
    ids = torch.arange(1000)
    with torch.no_grad():  # nobody keeps what was sent
        seen = [table.replica_rows(ids + first)[0] for first in range(0, 4000, 1000)]
        same = [torch.equal(rows.cpu(), table.weight[ids + 1000 * n]) for n, rows in enumerate(seen)]
    assert all(same) is not bool(left_out)


def test_leaving_the_repair_out_is_noticed() -> None:
    assert not same_bits(train("off", ONE)[0], train("exact", ONE, kind=Unmended)[0])


@pytest.mark.parametrize("devices", [ONE, SEVERAL, ALL])
def test_equal_to_the_cpu(devices: str) -> None:
    for ours, expected in zip(
        train("exact", devices, dtype=torch.float64)[0],
        train("off", "cpu", dtype=torch.float64)[0],
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


@needs_gpu
@pytest.mark.gpu
def test_rows_and_gradients_are_where_they_belong_and_counted() -> None:
    table = HostEmbedding(ROWS, DIM, seed=0)
    devices = [torch.device(name) for name in ALL.split(",")]
    table.place_on(devices, lambda rows: [len(part) for part in torch.arange(rows).chunk(len(devices))])
    ids = torch.arange(80).view(40, 2) % 20
    rows = table.replica_rows(ids)
    assert [part.device for part in rows] == devices[: len(rows)]
    assert torch.equal(torch.cat([part.cpu() for part in rows]), table.weight[ids])
    sum(part.square().sum().cpu() for part in rows).backward()
    gradient = table.weight.grad
    assert gradient.device.type == "cpu"
    torch.testing.assert_close(gradient.to_dense()[:20], 8 * table.weight.detach()[:20])
    assert table.counters.unique == sum(len(share.unique()) for share in ids.chunk(len(devices)))


@needs_gpu
@pytest.mark.gpu
def test_a_pipeline_that_is_left_gives_its_memory_back() -> None:
    table = HostEmbedding(ROWS, DIM, seed=0)
    table.place_on([torch.device("cuda:0")], lambda rows: [rows])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with RowPipeline({"t": table}) as pipeline:
            for ids_BF in pipeline.prefetch(batches(), lambda ids: {"t": ids}):
                with torch.no_grad():
                    table.replica_rows(ids_BF)
                break
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20
