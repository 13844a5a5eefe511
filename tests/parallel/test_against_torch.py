"""Torch's own replicate, scatter and gather, run against ours: their code objects with the device-only calls
rebound to copies."""

import importlib
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.parallel import DataParallel, gather, replicate, resolve_devices, scatter, split_sizes
from tests.parallel.zoo import MODES, SHAPES, Running, mlp_batchnorm, spectral_norm

torch_replicate = importlib.import_module("torch.nn.parallel.replicate")
torch_parallel_apply = importlib.import_module("torch.nn.parallel.parallel_apply")
torch_scatter_gather = importlib.import_module("torch.nn.parallel.scatter_gather")


def rebound(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """The function's own code with some of its globals replaced."""
    scope = dict(vars(importlib.import_module(function.__module__))) | names
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    scope[function.__name__] = copy
    return copy


def copies(tensors: list[Tensor], devices: list[Any], detach: bool = False) -> list[list[Tensor]]:
    # As on GPUs, the first device gets the tensors themselves, or with gradients what an autograd function
    # makes of them.
    first = list(tensors) if detach else [t.view_as(t) for t in tensors]
    return [
        first if j == 0 else [t.detach().clone() if detach else t.clone() for t in tensors]
        for j in range(len(devices))
    ]


upstream_replicate = rebound(
    torch_replicate.replicate,
    _get_device_index=lambda device, optional=False: device,
    _broadcast_coalesced_reshape=copies,
)


class ChunkedScatter:
    @staticmethod
    def apply(devices: list[Any], sizes: Any, dim: int, value: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in value.chunk(len(devices), dim))


class Joined:
    @staticmethod
    def apply(target: Any, dim: int, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim)


upstream_scatter = rebound(torch_scatter_gather.scatter, Scatter=ChunkedScatter)
upstream_gather = rebound(torch_scatter_gather.gather, Gather=Joined)


class OtherTorch:
    """torch, but with an accelerator that is there and does nothing."""

    accelerator = types.SimpleNamespace(
        current_stream=lambda device=None: nullcontext(),
        device_index=lambda device: nullcontext(),
        is_available=lambda: True,
        current_accelerator=lambda: types.SimpleNamespace(type="cpu"),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


upstream_scatter_kwargs = rebound(torch_scatter_gather.scatter_kwargs, scatter=upstream_scatter)
upstream_parallel_apply = rebound(
    torch_parallel_apply.parallel_apply,
    torch=OtherTorch(),
    _get_device_index=lambda device, optional=False: device,
)


def structure(module: nn.Module) -> dict[str, Any]:
    """What a replica is made of: kinds, attributes, which tensors are parameters, buffers or plain, and their
    values."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        tensors = {
            key: value.detach().clone() for key, value in vars(part).items() if isinstance(value, Tensor)
        }
        found[name] = (
            type(part),
            sorted(set(vars(part)) - {"_is_replica"}),
            sorted(part._parameters.keys() - vars(part).keys()),  # ours finds all of them
            sorted(part._buffers),
            sorted(part._modules),
            {key: value.tolist() for key, value in sorted(tensors.items())},
            {key: None if value is None else value.tolist() for key, value in sorted(part._buffers.items())},
        )
    return found


@pytest.mark.parametrize("make", SHAPES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize("detach", [False, True])
def test_replicas_have_the_structure_of_torchs(
    make: Callable[[], nn.Module], devices: int, detach: bool
) -> None:
    torch.manual_seed(0)
    module = make()
    theirs = upstream_replicate(module, list(range(devices)), detach)
    ours = replicate(module, resolve_devices(f"cpu*{devices}"), detach)
    assert len(ours) == len(theirs)
    for mine, their in zip(ours, theirs, strict=True):
        assert structure(mine) == structure(their)


@pytest.mark.parametrize("make", SHAPES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_step_equals_that_of_torchs_own_code(make: Callable[[], nn.Module], devices: int) -> None:
    torch.manual_seed(0)
    one = make().double()
    torch.manual_seed(0)
    two = make().double()
    x = torch.randn(16, *SHAPES[make], dtype=torch.float64)
    places = list(range(len(split_sizes(16, devices))))
    theirs = upstream_gather(
        [m(c) for m, c in zip(upstream_replicate(one, places), upstream_scatter(x, places), strict=True)], 0
    )
    ours = DataParallel(two, f"cpu*{devices}")(x)
    assert torch.equal(ours, theirs)
    theirs.square().sum().backward()
    ours.square().sum().backward()
    for (name, p1), p2 in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p2.grad, p1.grad, rtol=1e-12, atol=1e-12, msg=name)
    for (name, b1), b2 in zip(one.named_buffers(), two.buffers(), strict=True):
        assert torch.equal(b1, b2), name


@pytest.mark.parametrize(
    "make", [m for m in SHAPES if m not in (mlp_batchnorm, spectral_norm)], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("mode", MODES)
def test_networks_without_batch_state_equal_themselves_unsplit(
    make: Callable[[], nn.Module], devices: int, mode: str
) -> None:
    torch.manual_seed(1)
    module = make().double()
    region = Running(module, f"cpu*{devices}", mode)
    for rows in (1, 2, 7, 11, 33):
        x = torch.randn(rows, *SHAPES[make], dtype=torch.float64, requires_grad=True)
        found = []
        for each in (region, module):
            y = each(x)
            grads = torch.autograd.grad(y.sin().sum(), [x, *module.parameters()], allow_unused=True)
            found.append([y, *grads])
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


class Keyword(nn.Module):
    """Takes a tensor by keyword, one by position, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor, *, scale: Tensor, flag: bool | None = None) -> dict[str, Any]:
        y = self.layer(x) * scale
        return {"y": -y if flag else y, "pair": (y.sum(1), None)}


@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("flag", [{}, {"flag": True}])
def test_a_call_with_keywords_equals_torchs_scatter_kwargs_and_parallel_apply(
    devices: int, flag: dict[str, bool]
) -> None:
    module = Keyword()
    x, scale = torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 1, dtype=torch.float64)
    places = list(range(len(split_sizes(16, devices))))
    args, kwargs = upstream_scatter_kwargs((x,), {"scale": scale, **flag}, places)
    theirs = upstream_gather(
        upstream_parallel_apply(upstream_replicate(module, places), args, kwargs, places), 0
    )
    for mode in MODES:
        ours = Running(module, f"cpu*{devices}", mode)(x, scale=scale, **flag)
        assert torch.equal(ours["y"], theirs["y"])
        assert torch.equal(ours["pair"][0], theirs["pair"][0])
        assert ours["pair"][1] is None


def test_integer_weights_give_the_same_bits() -> None:
    module = nn.Linear(6, 4).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape))
    x = torch.randint(-4, 5, (33, 6)).double()
    for devices in (1, 2, 3, 5, 8):
        module.zero_grad()
        y = DataParallel(module, f"cpu*{devices}")(x)
        assert torch.equal(y, module(x))
        y.sum().backward()
        assert torch.equal(module.weight.grad, x.sum(0).expand(4, 6))


def test_gradients_of_gradients() -> None:
    wrapped = DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), "cpu*3")
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = wrapped.module[0].weight

    def call(x: Tensor, _: Tensor) -> Tensor:
        return wrapped(x)  # the checks change the weight in place and ask for its gradient

    assert torch.autograd.gradcheck(call, (x, weight))
    assert torch.autograd.gradgradcheck(call, (x, weight))


def test_scatter_and_gather_equal_torchs_on_nests() -> None:
    x = torch.arange(20.0).view(10, 2)
    nest = ({"a": x, "b": [x + 1, None]}, (x * 2, "text", 3))
    for count in (1, 2, 3, 8):
        sizes = split_sizes(10, count)
        ours = scatter(nest, resolve_devices(f"cpu*{count}"), sizes=sizes)
        theirs = upstream_scatter(nest, list(range(len(sizes))))
        assert repr(ours) == repr([*theirs])
        assert torch.equal(
            gather([part[0]["a"] for part in ours], "cpu"),
            upstream_gather([part[0]["a"] for part in theirs], 0),
        )
