"""Classes of mistakes that nn.DataParallel makes in silence, by letter: each is right here, or refused by
name."""

import dataclasses
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.parallel import DataParallel, Whole, compare_split, device_count
from dphybrid.parallel.check import check_module
from dphybrid.util.errors import UserError
from tests.parallel.zoo import Does, Mirrored

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


# P: outputs of classes that mirror their items as attributes


def test_p_a_tensor_in_an_outputs_attribute_is_refused() -> None:
    with pytest.raises(UserError, match="a Mirrored carries a tensor beside its items"):
        DataParallel(Does(lambda x: Mirrored(logits=x)), "cpu*2")(X)


# Q: functional_call


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize("direct", [True, False])
def test_q_functional_call_takes_the_names_of_the_state_dict(devices: str, direct: bool) -> None:
    def inner() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 3) if direct else made()

    bare, model = nn.Sequential(inner()), nn.Sequential(DataParallel(inner(), devices))
    other = {name: torch.rand_like(value) for name, value in bare.state_dict().items() if value.dim()}
    assert other.keys() <= model.state_dict().keys()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = torch.func.functional_call(bare, other, (X,))
    torch.testing.assert_close(torch.func.functional_call(model, other, (X,)), expected)
    named = {name.replace("0.", "0.module.", 1): value for name, value in other.items()}
    torch.testing.assert_close(torch.func.functional_call(model, named, (X,)), expected)
    for name, value in model.state_dict().items():  # as it was
        assert torch.equal(value, before[name])
        assert torch.equal(model.get_parameter(name) if "weight" in name else value, value)


# R and S: parameters and state in a replica's self


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        own = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        named = dict(self.layer.named_parameters())["bias"].sum()
        return self.layer(x).squeeze(1) + own + named + next(self.parameters()).mean()


def test_r_parameters_summed_in_a_replica_are_all_of_them() -> None:
    torch.manual_seed(0)
    module = Penalised()
    expected = module(X)
    (expected.sum()).backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    found = DataParallel(module, "cpu*3")(X)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([p.grad for p in module.parameters()], grads)
    assert check_module(module) == []
    with torch.no_grad():
        torch.testing.assert_close(DataParallel(module, "cpu*3")(X), expected)


class Counts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.total = how, 0.0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        return x

    def note(self, x: Tensor) -> None:
        if self.how == "attribute":
            self.total += float(x.sum())
        elif self.how == "buffer":
            self.seen += len(x)


@pytest.mark.parametrize("how", ["attribute", "buffer"])
def test_s_state_summed_in_a_replica_is_named_by_the_comparison(how: str) -> None:
    name = {"attribute": "total", "buffer": "seen"}[how]
    module = nn.Sequential(nn.Linear(3, 3), Counts(how))
    region = DataParallel(module, "cpu*2")
    (difference,) = compare_split(region, X)
    assert difference.text().startswith(
        f"BREAKS  1 [self.{name}]: forward writes it, and all replicas but the first lose what they write"
    )
    assert compare_split(DataParallel(nn.Sequential(nn.Linear(3, 3), Counts("not")), "cpu*2"), X) == []


# T: a comparison leaves nothing behind


@dataclasses.dataclass
class Meter:
    count: int = 0


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[int] = []
        self.held = {"last": deque[int](), "nested": [[0]]}
        self.meter = Meter()
        self.sums = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.held["last"].append(len(x))
        self.held["nested"][0].append(len(x))  # type: ignore[union-attr]
        self.meter.count += 1
        self.sums += 1
        return self.layer(x)


def test_t_a_comparison_changes_no_list_no_buffer_and_no_tensor() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.log: list[int] = []
            self.region = DataParallel(Remembers(), "cpu*2")

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            self.log.append(len(x))
            return self.region(x)

    model, before = Around(), Remembers()
    found = compare_split(model, torch.randn(6, 3))
    assert [one.where for one in found] == ["self.seen"]  # the first of what every replica writes
    assert (float(model.steps), model.log) == (0, [])
    module = model.region.module
    assert (module.seen, module.held, module.meter, module.sums) == (
        before.seen, before.held, before.meter, before.sums,
    )  # fmt: skip


# U: what all samples share


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sum()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


SHARED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
    "weights that are summed": (weighted, X, torch.rand(8)),
    "weights of the features": (torch.mul, torch.randn(2, 2), torch.rand(2)),
    "normalised weights": (lambda x, w: x * w.softmax(0)[:, None], X, torch.rand(8)),
    "weights of the classes": (
        lambda x, w: F.cross_entropy(x, x.argmax(1), w, reduction="none"),
        torch.randn(8, 8),
        torch.rand(8),
    ),
    "a matrix": (lambda x, w: x @ w, torch.randn(3, 3), torch.rand(3, 3)),
    "a mask of as many steps": (masked, torch.randn(4, 4, 6), torch.ones(4, 4).tril().bool()),
    "a mask that would be broadcast": (masked, torch.randn(2, 2, 6), torch.ones(2, 2).tril().bool()),
}


@pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*8"])
@pytest.mark.parametrize("name", SHARED)
def test_u_a_shared_tensor_is_found_or_fails_in_the_module(name: str, devices: str) -> None:
    function, x, shared = SHARED[name]
    fails = ["weights of the classes", "a matrix"] + ["a mask of as many steps"] * (devices == "cpu*2")
    if devices != "cpu" and name in fails:
        with pytest.raises((RuntimeError, IndexError)):  # as its share has fewer weights than classes
            compare_split(DataParallel(Does(function), devices), x, shared)
    else:
        found = compare_split(DataParallel(Does(function), devices), x, shared)
        assert [one.breaks for one in found] == [True]
        assert "Whole(...)" in found[0].remedy
    if name != "normalised weights":  # whose gradient is a matter of all samples
        region = DataParallel(Does(function), devices)
        torch.testing.assert_close(region(x, Whole(shared)), function(x, shared))
        assert compare_split(region, x, Whole(shared)) == []


def test_u_a_tensor_of_the_samples_passes() -> None:
    def loss(x: Tensor, weight: Tensor, labels: Tensor, flags: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, reduction="none") * weight * flags

    region = DataParallel(nn.Sequential(nn.BatchNorm1d(3)), "cpu*2")
    assert region(X).shape == X.shape
    given = X, torch.rand(8), torch.arange(8) % 3, torch.rand(8) > 0.5
    torch.testing.assert_close(DataParallel(Does(loss), "cpu*2")(*given), loss(*given))
    assert compare_split(region, X) == compare_split(DataParallel(Does(loss), "cpu*2"), *given) == []


# Numbers, samples alone, masks


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_a_number_as_a_tensor_reaches_every_replica(devices: str) -> None:
    def loss(x: Tensor, *, num_items_in_batch: Tensor) -> Tensor:
        return x.sum(1) / num_items_in_batch

    number = torch.tensor(16.0, requires_grad=True)
    out = DataParallel(Does(loss), devices)(X, num_items_in_batch=number)
    torch.testing.assert_close(out, X.sum(1) / 16)
    out.sum().backward()
    torch.testing.assert_close(number.grad, -X.sum() / 256)
    assert torch.equal(DataParallel(Does(lambda n: n * 2), devices)(torch.tensor(3)), torch.tensor(6))


@pytest.mark.parametrize(
    ("module", "given"),
    [
        (nn.Linear(8, 3), (torch.ones(8),)),
        (nn.Conv2d(1, 2, 3), (torch.ones(1, 9, 9),)),
        (nn.LSTM(3, 4, batch_first=True), (torch.ones(6, 3),)),
        (Does(lambda x, ids: x[ids]), (X, torch.arange(8))),
    ],
)
def test_an_error_in_a_replica_says_what_was_split_and_what_may_be_meant(
    module: nn.Module, given: tuple[Tensor, ...]
) -> None:
    region = DataParallel(module, "cpu*2")
    try:
        out = region(*given)
    except (RuntimeError, ValueError, IndexError, UserError) as error:
        told = f"{error} {' '.join(error.__notes__) if hasattr(error, '__notes__') else ''}"
        assert "batch dim" in told or "return the batch on dim" in told
    else:
        torch.testing.assert_close(out, module(*given))


# Devices


def test_devices_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu*3")
    assert device_count() == 3
    assert len(DataParallel(nn.Linear(3, 3)).devices) == 3
    assert len(DataParallel(nn.Linear(3, 3), "cpu*2").devices) == 2
    monkeypatch.setenv("DPHYBRID_DEVICES", "gpu7")
    with pytest.raises(UserError, match="cannot read 'gpu7'"):
        DataParallel(nn.Linear(3, 3))
