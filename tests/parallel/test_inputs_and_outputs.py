"""Nested inputs and outputs of every kind reach the replicas and come back as they are without a split."""

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from dphybrid.parallel import DataParallel, Whole
from tests.parallel.zoo import MODES, Does, Running

SAMPLES = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_a_number_as_a_tensor_reaches_every_replica(devices: str) -> None:
    def loss(x: Tensor, *, num_items_in_batch: Tensor) -> Tensor:
        return x.sum(1) / num_items_in_batch

    number = torch.tensor(16.0, requires_grad=True)
    out = DataParallel(Does(loss), devices)(SAMPLES, num_items_in_batch=number)
    torch.testing.assert_close(out, SAMPLES.sum(1) / 16)
    out.sum().backward()
    torch.testing.assert_close(number.grad, -SAMPLES.sum() / 256)
    assert torch.equal(DataParallel(Does(lambda n: n * 2), devices)(torch.tensor(3)), torch.tensor(6))


@pytest.mark.parametrize("mode", MODES)
def test_dicts_with_their_keys_in_another_order_in_each_replica(mode: Any) -> None:
    def swap(x: Tensor) -> dict[str, Tensor]:
        pairs = [("loss", x), ("score", -x)]
        return dict(pairs if x[0] < 2 else pairs[::-1])

    x = torch.arange(6.0)
    out = Running(Does(swap), "cpu*3", mode=mode)(x)
    assert torch.equal(out["loss"], x)
    assert torch.equal(out["score"], -x)


@pytest.mark.parametrize("devices", ["cpu*2", "cpu*3"])
def test_outputs_with_several_rows_for_each_sample(devices: str) -> None:
    x = torch.randn(8, 3)
    for by_sample in (lambda x: x.repeat_interleave(2, 0), lambda x: torch.stack([x, -x], 1).flatten(0, 1)):
        assert torch.equal(DataParallel(Does(by_sample), devices)(x), by_sample(x))


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
