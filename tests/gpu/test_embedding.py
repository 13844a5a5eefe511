"""What the engine must show on real GPUs: the same bits with and without prefetching, the CPU's numbers, and
copies that are told."""

import pytest
import torch
from torch import nn

from dphybrid.embedding import HostEmbedding, RowPipeline, clip_grad_norm_, make_row_optimizer
from dphybrid.parallel import DataParallel, parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, DIM, BATCH, COLUMNS, STEPS = 5000, 16, 64, 8, 200
ALL_GPUS = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))


class Unmended(HostEmbedding):
    """What a pipeline without the repair would be."""

    def repair(self, lookup: object) -> None:
        return


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
    rows = make_row_optimizer(optimizer, {"t": table}, lr=0.05)
    dense = torch.optim.SGD(region.parameters(), lr=0.01)
    losses: list[torch.Tensor] = []
    with RowPipeline({"t": table}, mode=mode) as pipeline:
        for step, ids_BF in enumerate(pipeline.prefetch(batches(), lambda ids: {"t": ids})):
            dense.zero_grad()
            rows.zero_grad()
            loss = (region(parts(table.replica_rows(ids_BF))) - 1).square().mean()
            loss.backward()
            clip_grad_norm_([*region.parameters(), table.weight], 0.5)
            dense.step()
            rows.step()
            losses.append(loss.detach().cpu())
            if step == 100:
                with torch.no_grad():
                    losses.append(region(parts(table.replica_rows(ids_BF))).sum().cpu())
        torch.cuda.synchronize()
        counters = pipeline.counters()
    tensors = [
        *losses,
        table.weight,
        *rows.states().values(),
        *(p.detach().cpu() for p in region.parameters()),
    ]
    return tensors, counters


def same_bits(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "lazy-adam", "adamw"])
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0*4", ALL_GPUS])
def test_same_bits_as_without(devices: str, optimizer: str) -> None:
    assert same_bits(train("off", devices, optimizer)[0], train("exact", devices, optimizer)[0])


def test_leaving_the_repair_out_is_noticed() -> None:
    assert not same_bits(train("off", "cuda:0")[0], train("exact", "cuda:0", kind=Unmended)[0])


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0*3", ALL_GPUS])
def test_equal_to_the_cpu(devices: str) -> None:
    for ours, expected in zip(
        train("exact", devices, dtype=torch.float64)[0],
        train("off", "cpu", dtype=torch.float64)[0],
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


def test_rows_and_gradients_are_where_they_belong_and_counted() -> None:
    table = HostEmbedding(ROWS, DIM)
    devices = [torch.device(name) for name in ALL_GPUS.split(",")]
    table.place_on(devices, lambda rows: [len(part) for part in torch.arange(rows).chunk(len(devices))])
    ids = torch.arange(80).view(40, 2) % 20
    rows = table.replica_rows(ids)
    assert [part.device for part in rows] == devices[: len(rows)]
    assert torch.equal(torch.cat([part.cpu() for part in rows]), table.weight[ids])
    sum(part.square().sum().cpu() for part in rows).backward()
    found = table.row_gradients()
    assert found is not None
    assert found[1].device.type == "cpu"
    torch.testing.assert_close(found[1], 8 * table.weight[:20])
    torch.cuda.synchronize()
    totals = table.totals()
    shares = ids.chunk(len(devices))
    assert totals["bytes_from_devices"] == DIM * 4 * sum(len(share.unique()) for share in shares)
    assert totals["bytes_to_devices"] > totals["bytes_from_devices"]
    assert totals["h2d_ms"] > 0


def test_a_pipeline_that_is_left_gives_its_memory_back() -> None:
    table = HostEmbedding(ROWS, DIM)
    table.place_on([torch.device("cuda:0")], lambda rows: [rows])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with RowPipeline({"t": table}, lookahead=3) as pipeline:
            for ids_BF in pipeline.prefetch(batches(), lambda ids: {"t": ids}):
                with torch.no_grad():
                    table.replica_rows(ids_BF)
                break
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20
