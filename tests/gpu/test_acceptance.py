"""What one real GPU must show. Needs torch, pytest and this project's parallel and embedding parts; skips
where there is no GPU."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dphybrid.parallel import DataParallel, resolve_devices, split_sizes
from tests.parallel.zoo import MODES, Running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TWO = pytest.param(
    "cuda:0,cuda:1",
    marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
)
REFERENCE = {
    1: [[30], [10]],
    2: [[15, 15], [5, 5]],
    3: [[10, 10, 10], [4, 4, 2]],
    8: [[4] * 7 + [2], [2] * 5],
}


@pytest.fixture(autouse=True)
def exact_arithmetic() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def step(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return y.detach().cpu(), [p.grad.cpu() for p in module.parameters() if p.grad is not None]


def close(one: tuple[Tensor, list[Tensor]], two: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(one[0], two[0], rtol=1e-10, atol=1e-12)
    for a, b in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_auto_takes_the_gpus_and_cpu_modules_move_there() -> None:
    devices = resolve_devices("auto")
    assert (devices.home.type, len(devices), devices.noun) == ("cuda", torch.cuda.device_count(), "GPUs")
    wrapped = DataParallel(mlp(), "cuda:0")
    assert {p.device for p in wrapped.parameters()} == {torch.device("cuda:0")}
    with pytest.raises(ValueError, match="does not exist"):
        resolve_devices(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("devices", ["cuda:0", TWO])
def test_gpus_compute_as_the_cpu(devices: str) -> None:
    x = torch.randn(31, 5, dtype=torch.float64)
    close(step(DataParallel(mlp(), devices), x), step(mlp(), x))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_virtual_devices_on_a_gpu_split_and_compute_as_on_the_cpu(devices: int) -> None:
    wrapped = DataParallel(mlp(), f"cuda:0*{devices}")
    for rows, expected in zip((30, 10), REFERENCE[devices], strict=True):
        x = torch.randn(rows, 5, dtype=torch.float64)
        close(step(wrapped, x), step(mlp(), x))
        close(step(wrapped, x.cuda()), step(DataParallel(mlp(), f"cpu*{devices}"), x))
        assert [size[0] for size in wrapped.last_split.input_sizes] == expected == split_sizes(rows, devices)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_equal_to_torchs_own_data_parallel_on_one_gpu_named_often(devices: int) -> None:
    x = torch.randn(30, 5, dtype=torch.float64)
    theirs = nn.DataParallel(mlp().cuda(), device_ids=[0] * devices)
    close(step(DataParallel(mlp(), [0] * devices), x), step(theirs, x.cuda()))


def test_the_callers_batch_on_the_gpu_is_not_changed_in_place() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    x = torch.zeros(6, 2, device="cuda:0")
    assert torch.equal(DataParallel(InPlace(), "cuda:0*3")(x), torch.ones_like(x))
    assert torch.equal(x, torch.zeros_like(x))


def test_buffers_are_those_of_the_first_replica() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4).double()
    x = torch.randn(12, 4, dtype=torch.float64)
    wrapped = DataParallel(copy.deepcopy(norm), "cuda:0*3")
    wrapped(x)
    alone = norm.cuda()
    alone(x[:4].cuda())
    torch.testing.assert_close(wrapped.module.running_mean, alone.running_mean, rtol=1e-12, atol=1e-12)
    assert int(wrapped.module.num_batches_tracked) == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_modes_reach_every_replica(mode: str) -> None:
    seen: list[tuple[torch.dtype, bool, bool]] = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.layer(x).dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return x

    wrapped = Running(Look(), "cuda:0*2", mode)
    x = torch.randn(6, 4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        wrapped(x)
    with torch.no_grad():
        wrapped(x)
    with torch.inference_mode():
        wrapped(x)
    assert (
        seen
        == [(torch.bfloat16, True, False)] * 2
        + [(torch.float32, False, False)] * 2
        + [(torch.float32, False, True)] * 2
    )


def test_a_short_batch_works_and_a_stray_tensor_is_refused() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: None = None) -> Tensor:
            return x

    wrapped = DataParallel(Masked(), "cuda:0*8")
    assert len(wrapped(torch.ones(10, 2), mask=None)) == 10
    with pytest.raises(ValueError, match="disagree"):
        wrapped(torch.ones(30, 2), torch.ones(1))


def test_pinned_inputs_arrive_whole() -> None:
    x = torch.randn(1000, 64).pin_memory()
    assert torch.equal(DataParallel(nn.Identity(), "cuda:0*4")(x).cpu(), x)


def test_files_are_the_same_for_every_kind_of_device() -> None:
    states = [DataParallel(mlp(), devices).state_dict() for devices in ("cpu", "cpu*3", "cuda:0", "cuda:0*3")]
    for state in states[1:]:
        assert list(state) == list(states[0])
        for key, value in state.items():
            assert torch.equal(value.cpu(), states[0][key])
    target = DataParallel(mlp(), "cuda:0*2")
    target.load_state_dict(states[0])


@pytest.mark.parametrize("devices", ["cuda:0*2", TWO])
def test_dropout_masks_are_independent_and_repeat(devices: str) -> None:
    wrapped = DataParallel(nn.Dropout(0.5), devices)
    x = torch.ones(200, 8, device="cuda:0")
    torch.manual_seed(3)
    first = wrapped(x)
    assert not torch.equal(first[:100], first[100:])
    torch.manual_seed(3)
    assert torch.equal(wrapped(x), first)
