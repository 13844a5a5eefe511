"""Rows that the next batch does not need are updated while the devices compute: the same bits as one after
the other, whatever comes in between."""

import functools
import operator
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.embedding import (
    HostEmbedding,
    RowPipeline,
    clip_grad_norm_,
    make_row_optimizer,
    native,
    plans,
)
from dphybrid.embedding.gradients import arrange_gradients
from dphybrid.embedding.optim import RowOptimizer
from dphybrid.embedding.plans import UpdatePlan
from dphybrid.parallel import DataParallel, parts
from tests.waiting import wait_until

ROWS, DIM, BATCH, COLUMNS = 3000, 8, 40, 4
OPTIMIZERS = ("sgd", "adagrad", "adam", "lazy-adam")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def worth_it_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "WORTH_BYTES", 1)


def zipf_batches(steps: int) -> Iterator[Tensor]:
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        chance = torch.rand(BATCH - step % 3, COLUMNS, generator=draw, dtype=torch.float64)
        yield ((ROWS**-0.05 * chance + 1 - chance) ** -20).long().clamp_(1, ROWS) - 1


class Trainee:
    """Tables of one width before a region on some devices, and what trains them. A row of the region's input
    is the sum of theirs."""

    def __init__(
        self, devices: str, optimizer: str, dtype: torch.dtype, sizes: tuple[int, ...] = (ROWS,)
    ) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Flatten(1), nn.Linear(COLUMNS * DIM, 8), nn.Tanh(), nn.Linear(8, 1))
        self.region = DataParallel(layers.double() if dtype == torch.float64 else layers, devices)
        self.tables = {
            name: HostEmbedding(size, DIM, seed=1, dtype=dtype, padding_idx=0)
            for name, size in zip("tuv", sizes, strict=False)
        }
        self.table = self.tables["t"]
        for table in self.tables.values():
            table.place_on(self.region.devices.replicas, self.region.sizes)
        self.rows: RowOptimizer = make_row_optimizer(optimizer, self.tables, lr=0.05, weight_decay=0.01)
        self.dense = torch.optim.SGD(self.region.parameters(), lr=0.01)

    def ids_of(self, ids: Tensor) -> dict[str, Tensor]:
        """The ids by table; a batch leaves out one of the others than the first."""
        left_out = int(ids[0, 0]) % 3
        tables = enumerate(self.tables.items())
        return {name: ids % table.num_rows for n, (name, table) in tables if not n or n != left_out}

    def outputs(self, ids: Tensor) -> Tensor:
        found = [self.tables[name].replica_rows(own) for name, own in self.ids_of(ids).items()]
        outputs: Tensor = self.region(parts([torch.stack(rows).sum(0) for rows in zip(*found, strict=True)]))
        return outputs

    def step(self, ids: Tensor, clip: float = 0.0) -> Tensor:
        self.dense.zero_grad()
        self.rows.zero_grad()
        loss = (self.outputs(ids) - 1).square().mean()
        loss.backward()
        if clip:
            clip_grad_norm_(self.region.parameters(), self.tables, clip)
        self.dense.step()
        self.rows.step()
        return loss.detach()

    def all_bits(self) -> list[Tensor]:
        blocks = [parameter.detach() for parameter in self.region.parameters()]
        weights = [table.weight for table in self.tables.values()]
        return [*self.rows.states().values(), *weights, *blocks]

    def ahead(self, mode: str = "exact", lookahead: int = 1) -> RowPipeline:
        return RowPipeline(self.tables, mode=mode, lookahead=lookahead, on_cpu=True)


def train(
    mode: str,
    devices: str,
    optimizer: str,
    dtype: torch.dtype,
    lookahead: int,
    steps: int,
    sizes: tuple[int, ...] = (ROWS,),
) -> tuple[list[Tensor], dict[str, float]]:
    one = Trainee(devices, optimizer, dtype, sizes)
    seen: list[Tensor] = []
    with one.ahead(mode, lookahead) as pipeline:
        for step, ids in enumerate(pipeline.prefetch(zipf_batches(steps), one.ids_of)):
            seen.append(one.step(ids, clip=0.05 if step % 3 else 0.0))
            if step % 7 == 3:  # an evaluation
                with torch.no_grad():
                    seen.append(one.outputs(ids).sum())
            if step % 13 == 5:  # a checkpoint
                seen += [value.clone() for value in one.all_bits()]
            if step == steps // 2:
                one.table.load_state_dict({"weight": one.table.weight * 0.5})
            if step == steps // 2 + 3:  # an edit by hand, then a batch that looks up another way
                one.table.weight[5] += 1
                seen.append(one.step(ids.flip(0)))
    return [*seen, *one.all_bits()], pipeline.counters()


def same_bits(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


SHORT = [
    ("cpu*2", "adagrad", torch.float32, 1),
    ("cpu*3", "adam", torch.bfloat16, 1),
    ("cpu*8", "lazy-adam", torch.float64, 3),
    ("cpu*2", "sgd", torch.bfloat16, 2),
    ("cpu", "adagrad", torch.float32, 1),
]


@pytest.mark.parametrize(("devices", "optimizer", "dtype", "lookahead"), SHORT)
def test_same_bits_as_one_after_the_other(
    devices: str, optimizer: str, dtype: torch.dtype, lookahead: int
) -> None:
    plain, _ = train("off", devices, optimizer, dtype, lookahead, 50)
    behind, counters = train("exact", devices, optimizer, dtype, lookahead, 50)
    assert same_bits(plain, behind)
    assert (counters["later_ms"] > 0) == (devices != "cpu")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_of_several_tables_of_one_width(
    optimizer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = (ROWS, 900, 1700)
    plain, _ = train("off", "cpu*2", optimizer, dtype, 1, 20, several)
    merged: list[int] = []
    sum_rows = native.sum_rows

    def sums(*args: Any) -> Any:
        merged.append(1)
        return sum_rows(*args)

    monkeypatch.setattr(native, "sum_rows", sums)
    behind, counters = train("exact", "cpu*2", optimizer, dtype, 1, 20, several)
    assert same_bits(plain, behind)
    assert counters["later_ms"] > 0
    assert len(merged) <= 1, "clipping writes sums only for the batch that nobody has announced"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("DPHYBRID_LONG_TESTS"), reason="minutes; set DPHYBRID_LONG_TESTS=1")
@pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*3", "cpu*8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_over_300_steps(devices: str, optimizer: str, dtype: torch.dtype) -> None:
    plain, _ = train("off", devices, optimizer, dtype, 1, 300)
    assert same_bits(plain, train("exact", devices, optimizer, dtype, 1, 300)[0])


def test_leaving_out_what_the_next_batch_needs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    link = UpdatePlan.link

    def wrong(plan: UpdatePlan, *args: object) -> None:
        link(plan, *args)  # type: ignore[arg-type]
        empty = plan.halves.first.ids_U[:0]
        for each in plan.halves.places:
            each[:] = [empty for _ in each]  # type: ignore[index]

    plain, _ = train("off", "cpu*2", "adagrad", torch.float32, 1, 30)
    monkeypatch.setattr(UpdatePlan, "link", wrong)
    assert not same_bits(plain, train("exact", "cpu*2", "adagrad", torch.float32, 1, 30)[0])


def test_whoever_reads_the_table_or_its_states_waits_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    update, gate, held = native.update, threading.Event(), threading.Event()

    def slowly(*args: object) -> None:
        if threading.current_thread().name.startswith("dphybrid-update"):
            held.set()
            assert gate.wait(10)
        update(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "update", slowly)
    for read in ("weight", "state_dict", "forward"):
        plain, behind = (Trainee("cpu*2", "adagrad", torch.float32) for _ in range(2))
        gate.clear()
        held.clear()
        batches = list(zipf_batches(3))
        with behind.ahead() as pipeline:
            for ids in pipeline.prefetch(batches, lambda ids: {"t": ids}):
                plan = behind.table.gradients.plan
                assert plan is not None
                linked = functools.partial(operator.attrgetter("halves.following"), plan)
                wait_until(linked, "the next batch to be prepared")
                behind.step(ids)
                plain.step(ids)
                assert held.wait(10), "nothing was left for later"
                threading.Timer(0.05, gate.set).start()
                if read == "weight":
                    assert torch.equal(behind.table.weight, plain.table.weight)
                elif read == "state_dict":
                    assert torch.equal(behind.rows.states()["t.sum"], plain.rows.states()["t.sum"])
                else:
                    assert torch.equal(behind.table(ids), plain.table.weight[ids])
                break


def test_an_error_of_the_update_behind_the_step_is_raised_at_the_next_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update = native.update

    def fail(*args: object) -> None:
        if threading.current_thread().name.startswith("dphybrid-update"):
            raise RuntimeError("no rows today")
        update(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "update", fail)
    one = Trainee("cpu*2", "sgd", torch.float32)

    def run() -> None:
        with one.ahead() as pipeline:
            for ids in pipeline.prefetch(zipf_batches(20), lambda ids: {"t": ids}):
                one.step(ids)

    with pytest.raises(RuntimeError, match="no rows today"):
        run()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dphybrid-")]


def test_a_plan_is_what_sorting_the_gradients_gives() -> None:
    one = Trainee("cpu*3", "sgd", torch.float32)
    ids = next(zipf_batches(1))
    lookup = one.table.ahead.prepare(one.table, ids)
    assert lookup is not None
    one.table.ahead.expect([lookup])
    one.region(parts(one.table.replica_rows(ids))).square().mean().backward()
    plain, _ = arrange_gradients([one.table.gradients], torch.float32)
    plan = one.table.ahead.plan(one.table, [lookup])
    assert plan is not None
    one.table.gradients.plan = plan
    planned, _ = arrange_gradients([one.table.gradients], torch.float32)
    assert isinstance(planned, plans.Planned)
    assert not isinstance(plain, plans.Planned)
    count = int(planned.bounds_U2.max())
    assert torch.equal(planned.keys_U, plain.keys_U)
    assert torch.equal(planned.bounds_U2, plain.bounds_U2)
    assert torch.equal(planned.places_N[:count], plain.places_N[:count])
    sums_UD, squares_U = native.sum_rows(plain, DIM, torch.float32)
    assert torch.equal(native.square_rows(planned, DIM, torch.float32), squares_U)
    torch.testing.assert_close(sums_UD.double().square().sum(1), squares_U)


def test_clipping_reads_once_from_a_device_and_has_torchs_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    layers(torch.randn(3, 4)).square().sum().backward()
    expected = nn.utils.get_total_norm([p.grad for p in layers.parameters() if p.grad is not None])
    reads: list[torch.Size] = []
    cpu = torch.Tensor.cpu

    def read(tensor: Tensor) -> Tensor:
        reads.append(tensor.shape)
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", read)
    before = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    norm = clip_grad_norm_(layers.parameters(), {}, 0.5)
    assert reads == [torch.Size([10])]
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for parameter, grad in zip(layers.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, grad * (0.5 / (norm + 1e-6)))
