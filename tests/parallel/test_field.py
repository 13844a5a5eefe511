"""What users of nn.DataParallel report: each works as on one device, or is refused by name."""

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import DataParallel, replication
from dphybrid.util.errors import UserError
from tests.parallel.zoo import Running

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Heads(nn.Module):
    """Two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 1) for name in "ab"})

    def forward(self, x: Tensor, head: str) -> Tensor:
        return self.heads[head](x)


def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replicas on the CPU take the way of replicas that have a GPU each, with torch's functions for GPUs
    replaced by what they compute."""

    def reduced(home: Any, count: int, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.stack(grads[i::count]).sum(0) for i in range(count))

    monkeypatch.setattr(replication, "distinct_gpus", lambda places: len(places) > 1)
    monkeypatch.setattr(
        replication.comm, "broadcast_coalesced", lambda ts, places: [[t.clone() for t in ts] for _ in places]
    )
    monkeypatch.setattr(replication.ReduceAddCoalesced, "apply", reduced)


@pytest.mark.parametrize("gpus", [False, True])
def test_a_parameter_that_no_replica_uses_has_no_gradient(
    gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpus:
        as_on_gpus(monkeypatch)
    found = []
    for devices in ("cpu", "cpu*2", "cpu*3"):
        region = DataParallel(Heads(), devices)
        optimizer = torch.optim.AdamW(region.parameters(), 0.1)
        for head in "ababbb":
            optimizer.zero_grad()
            region(X, head).square().mean().backward()
            assert region.module.heads["b" if head == "a" else "a"].weight.grad is None
            optimizer.step()
        found.append(region.module.heads["a"].weight.detach().clone())
    torch.testing.assert_close(found[1:], found[:1] * 2)


class UsedByTheFirst(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x[0, 0] == 0 else x[:, :1]


@pytest.mark.parametrize("gpus", [False, True])
def test_a_parameter_that_one_replica_uses_gets_its_gradient(
    gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpus:
        as_on_gpus(monkeypatch)
    region = DataParallel(UsedByTheFirst(2, 1), "cpu*3")
    region(torch.arange(6.0).view(3, 2)).sum().backward()
    assert region.module.weight.grad.tolist() == [[0, 1]]


class Versioned(nn.Module):
    """Its version 1 stored the weight transposed."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, versions: Any, *more: Any) -> None:
        if (versions.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, versions, *more)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("source", "target"), [("cpu*2", "cpu*2"), (None, "cpu*2"), ("cpu", None)])
def test_versions_in_a_state_dict_reach_the_module(
    source: str | None, target: str | None, nested: bool
) -> None:
    def made(devices: str | None) -> nn.Module:
        module: nn.Module = nn.ModuleDict({"module": Versioned()}) if nested else Versioned()
        return nn.ModuleDict({"net": module if devices is None else DataParallel(module, devices)})

    given, found = made(source), made(target)
    state = given.state_dict()
    versions = dict(state._metadata)
    found.load_state_dict(state)
    assert torch.equal(next(given.parameters()), next(found.parameters()))
    assert dict(state._metadata) == versions
    if target is not None:
        found["net"].load_state_dict(given["net"].state_dict())


def test_a_batch_norm_file_that_lacks_a_buffer_is_refused_with_the_keys_of_the_file() -> None:
    state = nn.Sequential(nn.BatchNorm1d(3)).state_dict()
    del state["0.num_batches_tracked"]
    state["0.weight"], state["more"] = torch.ones(4), torch.ones(1)
    with pytest.raises(RuntimeError) as caught:
        DataParallel(nn.Sequential(nn.BatchNorm1d(3)), "cpu*2").load_state_dict(state)
    for words in ('Missing key(s) in state_dict: "0.num_batches_tracked"', '"more"', "mismatch for 0.weight"):
        assert words in str(caught.value)
    assert "module." not in str(caught.value)


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_parts_set_and_removed_on_a_region_are_those_of_its_module(devices: str) -> None:
    module = nn.Sequential()
    module.body, module.fc = nn.Linear(4, 8), nn.Linear(8, 2)
    region = DataParallel(module, devices)
    region.fc = nn.Linear(region.fc.in_features, 10)
    assert region(X).shape == (6, 10)
    assert [name for name, _ in region.named_parameters()][-1] == "module.fc.bias"
    assert region.module.fc.weight.shape == (10, 8)
    linear = DataParallel(nn.Linear(4, 2), devices)
    linear.bias = None
    assert linear.module.bias is None
    assert list(linear.state_dict()) == ["weight"]
    del region.fc
    assert region(X).shape == (6, 8)
    with pytest.raises(UserError, match="the module has no 'head'; set it on the module"):
        region.head = nn.Linear(2, 2)


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_and_traced_modules_run_on_one_device_and_are_refused_on_several(make: Any) -> None:
    linear = nn.Linear(4, 2)
    torch.testing.assert_close(DataParallel(make(linear), "cpu")(X), linear(X))
    with pytest.raises(UserError, match="module '0' is scripted or traced.*wrap the module"):
        DataParallel(nn.Sequential(make(linear)), "cpu*2")


def test_max_norm_works_on_one_device_and_is_refused_on_several() -> None:
    ids = torch.arange(4)
    assert DataParallel(nn.Embedding(8, 8, max_norm=1.0), "cpu")(ids).norm(dim=1).max() < 1.001
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(UserError, match="module '0' has max_norm"):
            DataParallel(nn.Sequential(kind(8, 8, max_norm=1.0)), "cpu*2")


OPERATIONS = {
    "add": lambda rows: rows + 1,
    "rmul": lambda rows: 2 * rows,
    "matmul": lambda rows: rows @ torch.ones(4, 1),
    "getitem": lambda rows: rows[0],
    "len": len,
    "eq": lambda rows: rows == 0,
    "neg": lambda rows: -rows,
    "iter": list,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_rows_that_are_on_several_devices_say_where_they_belong(name: str) -> None:
    rows = DataParallel(nn.Linear(4, 1), "cpu*2").rows(HostEmbedding(9, 4), torch.tensor([1, 2]))
    with pytest.raises(UserError, match=rf"{name}: these rows are .* inside the region's module"):
        OPERATIONS[name](rows)


def test_a_table_takes_torchs_default_type_as_an_embedding_does() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        region, table = DataParallel(nn.Linear(4, 1), "cpu*2"), HostEmbedding(9, 4)
        assert region(region.rows(table, torch.arange(4))).dtype == torch.float64
        assert region(table(torch.arange(4))).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert HostEmbedding(9, 4).weight.dtype == torch.float32


def test_a_forked_child_starts_threads_of_its_own() -> None:
    region = Running(nn.Linear(4, 2), "cpu*2")
    region(X)
    if not (child := os.fork()):
        signal.alarm(20)
        region(X)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_table_in_distributed_data_parallel_refuses_before_torchs_backward(tmp_path: Any) -> None:
    """One process that believes to be one of two: the forward refuses before anything is sent."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(nn.Sequential(HostEmbedding(9, 4), nn.Linear(4, 1)))
        assert wrapped(torch.arange(4)).shape == (4, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
            with pytest.raises(UserError, match="each of 2 processes would train its own copy"):
                wrapped(torch.arange(4))
            with torch.no_grad():
                wrapped.module(torch.arange(4))
    finally:
        torch.distributed.destroy_process_group()
