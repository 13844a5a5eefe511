"""What nn.DataParallel computes wrongly without a word is right here, or refused by name before the numbers
count. One test a class."""

import contextlib
import dataclasses
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.parallel import DataParallel, Devices, Whole, parallel_apply
from dphybrid.parallel.applying import running
from dphybrid.util.errors import UserError
from tests.parallel.zoo import MODES, Does, Running


@pytest.mark.parametrize("mode", MODES)
def test_dicts_with_their_keys_in_another_order_in_each_replica(mode: Any) -> None:
    def swap(x: Tensor) -> dict[str, Tensor]:
        pairs = [("loss", x), ("score", -x)]
        return dict(pairs if x[0] < 2 else pairs[::-1])

    x = torch.arange(6.0)
    out = Running(Does(swap), "cpu*3", mode=mode)(x)
    assert torch.equal(out["loss"], x)
    assert torch.equal(out["score"], -x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["wants a gradient", "carries a graph"])
def test_gradients_of_every_replica_reach_a_buffer(mode: Any, kind: str) -> None:
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

    assert torch.equal(gradient(lambda m: Running(m, "cpu*3", mode=mode)), gradient(lambda m: m))


@pytest.mark.parametrize("mode", MODES)
def test_bare_tensors_given_to_parallel_apply_are_one_argument_each(mode: Any) -> None:
    xs = [torch.ones(2, 3), torch.zeros(2, 3)]
    for given in (xs, tuple(xs)):
        out = parallel_apply([nn.Identity(), nn.Identity()], given, None, "cpu*2", mode=mode)
        assert all(torch.equal(one, two) for one, two in zip(out, xs, strict=True))


@pytest.mark.parametrize("devices", ["cpu*2", "cpu*3"])
def test_outputs_with_several_rows_for_each_sample(devices: str) -> None:
    x = torch.randn(8, 3)
    for by_sample in (lambda x: x.repeat_interleave(2, 0), lambda x: torch.stack([x, -x], 1).flatten(0, 1)):
        assert torch.equal(DataParallel(Does(by_sample), devices)(x), by_sample(x))


def test_a_module_gets_the_shares_of_the_batches_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    wrapped = DataParallel(Does(lambda x: (print(len(x)), x)[1]), "cpu*2")
    for rows in (3, 4, 14):
        wrapped(torch.randn(rows, 2))
    assert capsys.readouterr().out.split() == ["2", "1", "2", "2", "7", "7"]


def test_in_place_work_on_inputs_does_not_reach_the_caller() -> None:
    devices = "cpu*3"
    x = torch.zeros(6, 2)
    alone = DataParallel(Does(lambda x: [x.add_(1)]), devices)
    nested = DataParallel(Does(lambda nest: [nest["x"].add_(1)]), devices)
    twice = DataParallel(Does(lambda a, b, *, c: [a.add_(1), b[0], c]), devices)  # which stays one tensor
    for _ in range(3):
        found = [*alone(x), *nested({"x": x}), *twice(x, [x], c=x)]
        assert all(torch.equal(out, torch.ones(6, 2)) for out in found)
    assert torch.equal(x, torch.zeros(6, 2))


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_what_is_given_whole_is_opened_at_every_call(devices: str) -> None:
    module = Does(lambda x, scale: x * scale)
    wrapped, x, scale = DataParallel(module, devices), torch.ones(4, 3), torch.full((3,), 2.0)
    for _ in range(3):
        assert torch.equal(wrapped(x, Whole(scale)), 2 * x)
        assert torch.equal(wrapped(x, scale=Whole(scale)), 2 * x)
        assert torch.equal(DataParallel(module, devices, whole=["scale"])(x, scale=scale), 2 * x)


def test_objects_without_tensors_reach_every_replica() -> None:
    seen: list[Any] = []
    plain = [
        object(),
        None,
        7,
        "text",
        {1, 2},
        frozenset("ab"),
        len,
        Does,
        torch.float32,
        range(3),
        b"x",
        ...,
    ]
    plain.append(types.SimpleNamespace(a=1))
    DataParallel(Does(lambda x, found: (seen.append(found), x)[1]), "cpu*2")(torch.randn(14, 2), plain)
    assert all(a is b for found in seen for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_dataclass_that_computes_from_the_batch_when_it_is_made(mode: Any) -> None:
    @dataclasses.dataclass
    class Normed:
        x: Tensor
        made: int = dataclasses.field(default=0, init=False)

        def __post_init__(self) -> None:
            self.x = self.x / self.x.sum()
            self.first = self.x[:, :1]  # no field, and split all the same

    batch = Normed(torch.rand(7, 3))
    batch.made = 5

    def read(b: Normed) -> Normed:
        assert b.made == 5
        assert torch.equal(b.first, b.x[:, :1])
        b.made = None  # type: ignore[assignment] # a number cannot be joined
        return b

    out = Running(Does(read), "cpu*3", mode=mode)(batch)
    assert torch.equal(out.x, batch.x)
    assert torch.equal(out.first, batch.first)
    assert batch.made == 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataParallel(nn.Linear(3, 3), "cpu"), "module '1' is data-parallel itself"),
        (lambda: torch.compile(nn.Linear(3, 3), backend="eager"), "module '1' is compiled"),
        (lambda: nn.SyncBatchNorm(3), "module '1' is a SyncBatchNorm, which synchronises processes"),
        (lambda: nn.LazyLinear(3), "module '1' has parameters without a size"),
        (lambda: nn.Linear(3, 3, device="meta"), "weight of module '1' is on meta"),
    ],
)
def test_a_module_replaced_after_wrapping_by_one_that_replicas_cannot_run(
    make: Callable[[], nn.Module], words: str
) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped, x = DataParallel(net, "cpu*2"), torch.randn(5, 3)
    wrapped(x)
    net[1] = nn.Linear(3, 4)
    torch.testing.assert_close(wrapped(x), net(x))
    net[1] = make()
    with pytest.raises(UserError, match=words):
        wrapped(torch.randn(5, 3))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("more", [True, False])
@pytest.mark.parametrize("form", ["bare", "torch's"])
def test_files_for_a_model_with_a_child_named_module(strict: bool, more: bool, form: str) -> None:
    def make() -> nn.Module:
        net = nn.Module()
        net.module = nn.Linear(3, 3)
        if more:
            net.head = nn.Linear(3, 3)
            net.module.module = nn.Linear(2, 2)
        return net

    source, target = make(), make()
    prefix = "" if form == "bare" else "module."
    state = {f"{prefix}{key}": value for key, value in source.state_dict().items()}
    found = DataParallel(target, "cpu*2").load_state_dict(state, strict=strict)
    assert not found.missing_keys
    assert not found.unexpected_keys
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)
    outer = nn.ModuleDict({"block": DataParallel(make(), "cpu*2")})
    outer.load_state_dict({f"block.{key}": value for key, value in state.items()}, strict=strict)
    for key, value in source.state_dict().items():
        assert torch.equal(outer.state_dict()[f"block.{key}"], value)


def test_replicas_in_threads_enter_the_callers_streams_and_draw_from_generators_of_their_own(
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
            return x + torch.rand(4, generator=generators[running().index])

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
            if (running().index, running().count) == (0, 2):
                raise torch.OutOfMemoryError("full")
            time.sleep(0.2)
            ended.set()
            return x

    with pytest.raises(torch.OutOfMemoryError, match="full") as caught:
        Running(Slow(), "cpu*2")(torch.ones(4, 3))
    assert ended.is_set()
    assert caught.value.__notes__ == ["in replica 0 of 2 on cpu[0]"]
