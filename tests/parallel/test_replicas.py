"""Replicas have all parameters, and their gradients, buffers, threads and errors come back as from one."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.parallel import DataParallel, Devices, parallel_apply, replication
from dphybrid.parallel.applying import running_replica
from tests.parallel.zoo import MODES, Running

SAMPLES = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        own = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        named = dict(self.layer.named_parameters())["bias"].sum()
        return self.layer(x).squeeze(1) + own + named + next(self.parameters()).mean()


def test_parameters_summed_in_a_replica_are_all_of_them() -> None:
    torch.manual_seed(0)
    module = Penalised()
    expected = module(SAMPLES)
    (expected.sum()).backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    found = DataParallel(module, "cpu*3")(SAMPLES)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([p.grad for p in module.parameters()], grads)
    with torch.no_grad():
        torch.testing.assert_close(DataParallel(module, "cpu*3")(SAMPLES), expected)


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


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
            region(ROWS, head).square().mean().backward()
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


def test_a_forked_child_starts_threads_of_its_own() -> None:
    region = Running(nn.Linear(4, 2), "cpu*2")
    region(ROWS)
    if not (child := os.fork()):
        signal.alarm(20)
        region(ROWS)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", ["wants a gradient", "carries a graph"])
def test_gradients_of_every_replica_reach_a_buffer(kind: str) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.root = nn.Parameter(torch.tensor([2.0, 3.0]))
            self.register_buffer("scale", torch.tensor([1.0, 1.0], requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def gradient(wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
        bare = Buffered()
        if kind == "carries a graph":
            bare.scale = bare.root * 5
        wrap(bare)(torch.arange(12.0).view(6, 2)).sum().backward()
        grad = bare.root.grad if kind == "carries a graph" else bare.scale.grad
        assert isinstance(grad, Tensor)
        return grad

    assert torch.equal(gradient(lambda m: Running(m, "cpu*3")), gradient(lambda m: m))


@pytest.mark.parametrize("mode", MODES)
def test_bare_tensors_given_to_parallel_apply_are_one_argument_each(mode: Any) -> None:
    xs = [torch.ones(2, 3), torch.zeros(2, 3)]
    for given in (xs, tuple(xs)):
        out = parallel_apply([nn.Identity(), nn.Identity()], given, None, "cpu*2", mode=mode)
        assert all(torch.equal(one, two) for one, two in zip(out, xs, strict=True))


def test_replicas_in_threads_have_the_callers_streams_and_own_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA devices and streams that only say when they are entered."""
    entered: list[tuple[str, Any]] = []
    places, generators = [torch.device("cuda", n) for n in range(2)], [torch.Generator(), torch.Generator()]
    for generator in generators:
        generator.manual_seed(7)  # as torch.manual_seed does
    before = [generator.get_state() for generator in generators]
    for kind in ("device", "stream"):
        enter = partial(lambda kind, what: contextlib.nullcontext(entered.append((kind, what))), kind)
        monkeypatch.setattr(torch.cuda, kind, enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the caller's on {device}")
    monkeypatch.setattr(torch.cuda, "default_generators", generators)

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(4, generator=generators[running_replica()])

    drawn: list[Any] = []
    for _ in range(2):
        torch.manual_seed(3)
        two = Devices("cuda:0,cuda:1", tuple(places), virtual=False)
        drawn += parallel_apply([Draws(), Draws()], [torch.ones(1), torch.zeros(1)], None, two)
    assert drawn[0].min() >= 1 > drawn[1].max()
    for place in places:
        assert {("stream", f"the caller's on {place}"), ("device", place)} <= set(entered)
    assert not torch.equal(drawn[0] - 1, drawn[1])
    assert torch.equal(torch.stack(drawn[:2]), torch.stack(drawn[2:]))
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, before, strict=True))


def test_a_failing_replica_is_told_with_its_place_when_all_have_ended() -> None:
    ended = threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if running_replica() == 0:
                raise torch.OutOfMemoryError("full")
            time.sleep(0.2)
            ended.set()
            return x

    with pytest.raises(torch.OutOfMemoryError, match="full") as caught:
        Running(Slow(), "cpu*2")(torch.ones(4, 3))
    assert ended.is_set()
    assert caught.value.__notes__ == ["in replica 0 of 2 on cpu[0]"]
