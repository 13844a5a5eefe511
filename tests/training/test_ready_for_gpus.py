"""What a run does so that its first hours on a GPU hold no surprise, seen on stand-ins: none is needed."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.config import TrainConfig
from dphybrid.embedding import HostEmbedding, RowPipeline
from dphybrid.embedding.ahead import LookupsAhead
from dphybrid.parallel import DataParallel, resolve_devices, start_on
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.text.model import Lstm
from dphybrid.training.checkpoint import generator_states, set_generators
from dphybrid.training.loop import numerics
from dphybrid.training.step import lower_precision, summed
from tests.commands import run_with
from tests.parallel.zoo import MODES, Running
from tests.preparing import clicks
from tests.refusing import refused


def test_layers_with_dropout_between_are_the_layered_network_bit_for_bit() -> None:
    """cuDNN's layered networks draw dropout from a state that no checkpoint holds; one layer draws none."""
    torch.manual_seed(3)
    ours = Lstm(5, 8, layers=3, dropout=0.4)
    torch.manual_seed(3)
    theirs = nn.LSTM(5, 8, 3, batch_first=True, dropout=0.4)
    assert all(module.num_layers == 1 for module in ours.modules() if isinstance(module, nn.LSTM))
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    rows_BTD = torch.randn(4, 6, 5)
    drawn = []
    for seed in (9, 9, 8):
        torch.manual_seed(seed)
        drawn.append(ours(rows_BTD))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    for part in ours.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    theirs.dropout = 0.0
    for training in (True, False):
        assert torch.equal(ours.train(training)(rows_BTD), theirs.train(training)(rows_BTD)[0])


def test_replicas_of_a_recurrent_network_flatten_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[bool] = []
    flatten = nn.LSTM.flatten_parameters
    network = Lstm(3, 4, layers=2, dropout=0.0)

    def seen(layer: nn.LSTM) -> None:
        calls.append("_is_replica" in vars(layer))
        flatten(layer)

    monkeypatch.setattr(nn.LSTM, "flatten_parameters", seen)
    x = torch.randn(4, 2, 3)
    one, two = DataParallel(network, "cpu"), DataParallel(network, "cpu*2")
    calls.clear()  # of moving it there
    whole = one(x)
    assert calls == []
    torch.testing.assert_close(two(x), whole)
    assert len(calls) >= 4
    assert all(calls)


@pytest.fixture
def cuda_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is asked of CUDA, in order, with the workspace setting at that moment."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    uuid = SimpleNamespace(uuid="1")

    def record(name: str, answer: object = None) -> Callable[..., object]:
        def call(*args: object) -> object:
            calls.append((name, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
            return answer

        return call

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    answers: dict[str, object] = {"init": None, "device_count": 1, "get_device_properties": uuid}
    answers |= {"set_device": None, "set_rng_state": None, "get_rng_state_all": [torch.ByteTensor([0, 0])]}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, record(name, answer))
    return calls


def test_the_workspace_setting_is_there_before_cuda_starts(
    cuda_calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = resolve_devices("cuda:0*2")
    for given, wanted in (("", ":4096:2"), (":16:8", ":16:8")):  # what the user has set stays
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
        if not given:
            monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        cuda_calls.clear()
        start_on(devices)
        assert cuda_calls[-1] == ("set_device", wanted)
        assert {workspace for _, workspace in cuda_calls} == {wanted}


def test_a_run_on_the_cpu_asks_cuda_for_nothing(
    cuda_calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    start_on(resolve_devices("cpu*2"))
    cuda_calls.clear()
    states = generator_states()
    set_generators({**states, "cuda": ["00"]})
    assert states["cuda"] == []
    assert cuda_calls == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_generators(generator_states())
    assert [name for name, _ in cuda_calls] == ["get_rng_state_all", "device_count", "set_rng_state"]


class Full:
    """Lookups for which no memory is there, while `left` is above 0."""

    def __init__(self, left: int, error: Exception) -> None:
        self.left, self.error, self.prepare = left, error, LookupsAhead.prepare

    def __call__(self, ahead: LookupsAhead, weight: Tensor, ids: Tensor, threads: int | None = 1) -> Any:
        if threads == 1 and self.left > 0:  # the worker's
            self.left -= 1
            raise self.error
        return self.prepare(ahead, weight, ids, threads)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_worker_without_memory_hands_its_batch_over_without_a_lookup(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = HostEmbedding(20, 4, seed=0)
    table.place_on(resolve_devices("cpu*2").replicas, lambda rows: [rows // 2] * 2)
    full = Full(2, error)
    monkeypatch.setattr(LookupsAhead, "prepare", lambda *args, **options: full(*args, **options))
    with RowPipeline({"t": table}, on_cpu=True) as pipeline:
        for ids in pipeline.prefetch([torch.arange(4)] * 5, lambda ids: {"t": ids}):
            assert torch.equal(torch.cat(table.replica_rows(ids)), table.weight[ids])
    counters = pipeline.counters()
    assert (counters["unique"], counters["prepared"]) == (20, 8)
    full.left, full.error = 1, RuntimeError("something else")
    with RowPipeline({"t": table}, on_cpu=True) as pipeline, pytest.raises(RuntimeError, match="something"):
        list(pipeline.prefetch([torch.arange(4)] * 2, lambda ids: {"t": ids}))


@pytest.mark.parametrize("mode", MODES)
def test_lower_precision_reaches_every_replica_and_neither_rows_nor_parameters(mode: Any) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, rows_BD: Tensor) -> Tensor:
            out_B = self.layer(rows_BD).squeeze(1)
            seen.append((rows_BD.dtype, out_B.dtype))
            return out_B

    table = HostEmbedding(50, 4, seed=0)
    region = Running(Scores(), "cpu*3", mode)
    with lower_precision("bfloat16", region):
        loss_B = region(table(torch.arange(6)))
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    total = summed(loss_B)
    total.backward()
    found = table.weight.grad._values()
    blocks = [parameter.grad for parameter in region.parameters() if parameter.grad is not None]
    assert {grad.dtype for grad in (total, found, *blocks)} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")
    with lower_precision("float32", region), torch.no_grad():
        assert region(table(torch.arange(6))).dtype == torch.float32
    # Thousands of losses add up.
    assert summed(torch.ones(4097, dtype=torch.bfloat16)).item() == 4097
    assert summed(torch.ones(3, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_gpus_round_products_only_where_it_was_asked_for(precision: Any) -> None:
    def flags() -> tuple[bool, ...]:
        return (
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        )

    before = flags()
    for strict in (False, True):
        with numerics(TrainConfig(precision=precision, deterministic=strict)):
            assert flags() == (precision == "tf32", precision == "tf32", strict)
        assert flags() == before


def test_a_run_in_bfloat16_learns_the_same(data_dir: Path, unrecorded: None) -> None:
    values = [*clicks(data_dir.parent, 600), "devices=cpu*2", "train.epochs=2", "train.batch_size=64"]
    values += ["model.kind=dlrm", "model.dim=4", "model.hidden=16", "model.dropout=0"]
    plain = run_with(*values).metrics
    rounded = run_with(*values, "train.precision=bfloat16", "train.deterministic=true").metrics
    assert rounded != plain
    assert rounded == pytest.approx(plain, abs=0.02)
    with refused(r"train.precision=bfloat16 needs model.dtype=float32, not float64"):
        build_config({"recipe": "ctr", "model": {"dtype": "float64"}, "train": {"precision": "bfloat16"}})
