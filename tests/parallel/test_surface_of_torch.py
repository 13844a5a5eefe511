"""torch.nn.parallel's whole surface, and what other projects do with it, in every way of running replicas."""

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, register_pytree_node

from dphybrid.parallel import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    resolve_devices,
    scatter,
    scatter_kwargs,
)
from tests.parallel.zoo import MODES, Does, Running

close = torch.testing.assert_close


def made(x: int = 5, y: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(x, 7), nn.Tanh(), nn.Linear(7, y)).double()


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# The constructor, and the function


def test_device_ids_by_position_and_name() -> None:
    x, bare = rows(7, 5), made()
    for given in ("cpu*3", ["cpu"] * 3, [torch.device("cpu")] * 3, [-1, -1, -1], resolve_devices("cpu*3")):
        close(DataParallel(made(), given)(x), bare(x))
        close(DataParallel(made(), device_ids=given, output_device="cpu", dim=0)(x), bare(x))
    assert DataParallel(made(), "cpu").device_ids == []
    assert DataParallel(made(), "cpu*2").device_ids == [torch.device("cpu")] * 2


def test_output_device() -> None:
    x = rows(6, 5)
    for given in (None, -1, "cpu", torch.device("cpu"), 1):
        assert DataParallel(made(), "cpu*2", given)(x).device.type == "cpu"
    assert DataParallel(made(), "cpu*2", "meta")(x).device.type == "meta"
    assert DataParallel(made(), "cpu", "meta")(x).device.type == "meta"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_any_dim_with_uneven_shares(dim: int, mode: Any) -> None:
    x = rows(7, 7)
    wrapped = Running(Does(lambda x, y: (x * 2, {"sum": x + y})), "cpu*3", dim=dim, mode=mode)
    double, rest = wrapped(x, y=-x)
    assert torch.equal(double, 2 * x)
    assert torch.equal(rest["sum"], 0 * x)
    assert wrapped.last_split is not None
    assert sorted(size[dim] for size in wrapped.last_split.input_sizes) == [1, 3, 3]
    assert torch.equal(wrapped(x, torch.ones(()))[1]["sum"], x + 1)


def test_the_function_with_keywords_and_without_inputs() -> None:
    net = Does(lambda x=None, *, scale=None: torch.ones(3, 1) if x is None else x * scale)
    x = rows(5, 2)
    for devices in ("cpu", "cpu*3"):
        assert torch.equal(data_parallel(net, None, devices), torch.ones(3, 1))
        close(data_parallel(net, (x,), devices, None, 0, {"scale": x}), x * x)


# The primitives, as the tutorial and others call them


@pytest.mark.parametrize("given", [["cpu"] * 3, [torch.device("cpu")] * 3])
def test_the_tutorials_own_lines(given: list[Any]) -> None:
    def in_parallel(module: nn.Module, inputs: Any, device_ids: list[Any], output_device: Any = None) -> Any:
        if output_device is None:
            output_device = device_ids[0]
        replicas = replicate(module, device_ids)
        shares = scatter(inputs, device_ids)
        replicas = replicas[: len(shares)]
        outputs = parallel_apply(replicas, shares)
        return gather(outputs, output_device)

    net, x = made(), rows(4, 5)
    close(in_parallel(net, x, given), net(x))
    in_parallel(net, x, given).sum().backward()
    grad = net[0].weight.grad.clone()
    net.zero_grad()
    net(x).sum().backward()
    close(net[0].weight.grad, grad)


def test_scatter_kwargs_gives_as_many_of_both() -> None:
    x = rows(10, 2)
    inputs, kwargs = scatter_kwargs((x,), {"flag": True}, "cpu*8")
    assert len(inputs) == len(kwargs) == 5
    assert all(kw == {"flag": True} for kw in kwargs)
    assert torch.equal(torch.cat([part[0] for part in inputs]), x)
    assert scatter_kwargs((), None, "cpu*2") == (((), ()), ({}, {}))


# Containers


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclasses.dataclass(slots=True, frozen=True)
class Slots:
    x: Tensor
    name: str | None = None


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """Results by key and by attribute, as Hugging Face's models return them."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        if self.loss is not None and not isinstance(self.loss, Tensor):
            for key, value in list(self.loss):
                self[key] = value
        else:
            for field in dataclasses.fields(self):
                if getattr(self, field.name) is not None:
                    self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        callable_, _, *rest = super().__reduce__()
        return (callable_, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest)


# As transformers registers its own.
register_pytree_node(
    Output,
    lambda value: (list(value.values()), list(value)),
    lambda items, names: Output(**dict(zip(names, items, strict=True))),
    flatten_with_keys_fn=lambda value: ([(MappingKey(k), v) for k, v in value.items()], list(value)),
)


NESTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, -x),
    "list": lambda x: [x, [x + 1, None]],
    "dict": lambda x: {"a": x, "b": {"c": -x}},
    "OrderedDict": lambda x: OrderedDict(z=x, a=-x),
    "defaultdict": lambda x: defaultdict(list, a=x, b=[x]),
    "namedtuple": lambda x: Pair(x, {"b": x}),
    "slots dataclass": lambda x: Slots(x),
    "deque": lambda x: deque([x, -x]),
    "ModelOutput": lambda x: Output(loss=x, logits=(x, -x)),
    "empty ones": lambda x: (x, (), [], {}),
    "nested": lambda x: {"a": [Pair((x, {"b": Slots(-x)}), None), (x,)]},
    "return type": lambda x: x.max(1, keepdim=True),
}


@pytest.mark.parametrize("name", NESTS)
@pytest.mark.parametrize("mode", MODES)
def test_containers_come_and_go_as_they_are(name: str, mode: Any) -> None:
    x = rows(7, 3)
    given = NESTS[name](x)
    out = Running(Does(lambda nest: nest), "cpu*3", mode=mode)(given)
    assert type(out) is type(given)
    assert repr(out) == repr(given)
    if isinstance(given, defaultdict):
        assert out.default_factory is list
    if hasattr(given, "logits"):
        assert out.logits is out["logits"]
    calls = Running(Does(lambda x: NESTS[name](x)), "cpu*3", mode=mode)
    assert repr(calls(x)) == repr(given)


# Habits


@pytest.mark.parametrize("mode", MODES)
def test_training_with_amp_checkpointing_and_two_inputs(mode: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = made().float()

        def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False) + y

    x, y = torch.randn(9, 5), torch.randn(9, 2)
    wrapped, bare = Running(Two(), "cpu*4", mode=mode), Two()
    for module in (wrapped, bare):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(x, y=y).float().square().mean().backward()
    close(wrapped.module.net[0].weight.grad, bare.net[0].weight.grad, rtol=2e-2, atol=2e-3)
