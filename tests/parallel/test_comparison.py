"""The comparison of a batch unsplit with itself split names the module that computes across the batch."""

import copy
import dataclasses
import random
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dphybrid.parallel import DataParallel, Dropout, Whole, check_split, compare_split
from dphybrid.parallel.copies import same
from dphybrid.util.errors import UserError
from tests.parallel import zoo
from tests.parallel.zoo import Does


class Head(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x)))


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.layer(x), dim=1)
        return F.cross_entropy(z @ z.t(), torch.arange(len(x), device=x.device), reduction="none")


class BatchSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


ACROSS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.softmax(0),
    lambda x: (x - x.mean(0)) / x.std(0),
    lambda x: x.sort(0).values,
    lambda x: x.cumsum(0),
    lambda x: x.flip(0),
    lambda x: x + torch.arange(len(x))[:, None],
    lambda x: torch.zeros_like(x).index_add_(0, torch.arange(len(x)) % 2, x),
]


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize(
    ("make", "module", "what"),
    [
        *((partial(Head, function), "1", "its input to 1.after") for function in ACROSS),
        (Contrastive, "1", "its output"),
        (BatchSecond, "1.attention", "its output"),
        (partial(nn.Softmax, 0), "1", "its output"),
    ],
)
def test_the_module_that_computes_across_the_batch_is_named(
    devices: str, make: Callable[[], nn.Module], module: str, what: str
) -> None:
    torch.manual_seed(0)
    region = DataParallel(nn.Sequential(nn.Linear(6, 6), make()), devices)
    model = nn.ModuleDict({"region": region})
    model.forward = lambda x: model["region"](x)  # type: ignore[method-assign]
    found = compare_split(model, torch.randn(7, 6))
    assert [(one.module, one.where) for one in found] == [(f"region.{module}", what)]
    assert f"BREAKS  region.{module} [{what}]: differs by" in found[0].text()


@pytest.mark.parametrize("make", zoo.SHAPES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_modules_that_treat_each_sample_alone_agree(make: Callable[[], nn.Module], devices: str) -> None:
    torch.manual_seed(0)
    region = DataParallel(nn.Sequential(make(), nn.Dropout(0.5)), devices)
    state = {key: value.clone() for key, value in region.state_dict().items()}
    random_state = torch.get_rng_state()
    assert (
        compare_split(region, torch.randn(11, *zoo.SHAPES[make], generator=torch.Generator().manual_seed(1)))
        == []
    )
    assert region.training
    assert region.module[1].training
    assert torch.equal(torch.get_rng_state(), random_state)
    for key, value in region.state_dict().items():
        assert torch.equal(value, state[key])


def test_the_comparison_leaves_no_split_on_record_and_stops_when_asked() -> None:
    region = DataParallel(nn.Softmax(0), "cpu*2")
    assert len(compare_split(region, torch.randn(5, 3))) == 1
    assert region.splits() == []
    told = "the model computes something else when the first batch is split:\nBREAKS .*its output.: differs"
    with pytest.raises(UserError, match=told):
        check_split(region, torch.randn(5, 3))
    check_split(DataParallel(nn.Softmax(1), "cpu*2"), torch.randn(5, 3))
    with pytest.raises(UserError, match="contains no DataParallel, so nothing would be split or compared"):
        check_split(nn.Softmax(0), torch.randn(5, 3))


class Codebook(nn.Module):
    """Moves its nearest code to the mean of the batch, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.codes[torch.cdist(x, self.codes).argmin(1)]
        if self.training:
            self.codes[0].lerp_(x.detach().mean(0), 0.1)
        return out


class Trains(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)) if self.training else self.layer(x)


def mixed_up(x: Tensor) -> Tensor:
    part = float(np.random.beta(1, 1))
    return part * x + (1 - part) * x[torch.randperm(len(x))]


class Counted(nn.Module):
    """Its scale falls with every call, which only replica 0 of several would remember."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / (1 + self.calls)


class Looked(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x[:, 0].abs().long() % 2)


@pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*4"])
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: Trains(lambda x: x - x.mean(0)), "its output"),
        (lambda: Trains(mixed_up), "its output"),
        (lambda: Trains(lambda x: F.dropout(torch.cat([x, x]))), "its output"),
        (lambda: nn.Sequential(nn.Linear(6, 6), Codebook()), "self.codes"),
        (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True)),
         "self.running_mean"),
        (lambda: Looked(scale_grad_by_freq=True), "the gradient of embedding.weight"),
        (Counted, "self.calls"),
    ],
)  # fmt: skip
def test_what_only_training_does_across_the_batch_is_found(
    devices: str, make: Callable[[], nn.Module], place: str
) -> None:
    torch.manual_seed(0)
    region, x = DataParallel(make(), devices), torch.randn(8, 6)
    found = compare_split(region, x)
    assert [(one.breaks, one.where) for one in found] == [(True, place)]


class Cached(nn.Module):
    """Keeps positions for the next call, as rotary embeddings do."""

    positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.arange(x.shape[1]).to(x)
        return x + self.positions


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[:, 0]


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[0][:, 0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_forward_hook(lambda module, inputs, output: (output, output[:, :2]))


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), Dropout(0.5)),
    "dropout of features": lambda: nn.Sequential(nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.RReLU()),
    "noise": lambda: Trains(lambda x: x + torch.randn_like(x) * torch.rand(len(x), 1)),
    "depth by chance": lambda: Trains(lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.7) / 0.7),
    "layers by chance": lambda: Trains(lambda x: x * 2 if random.random() < 0.5 else x),
    "gumbel": lambda: Trains(lambda x: F.gumbel_softmax(x, hard=True)),
    "sampled": lambda: Trains(lambda x: x * torch.multinomial(x.softmax(1), 2).sum(1, keepdim=True)),
    "attention": Attends,
    "recurrent": Recurs,
    "checkpointed": Checkpointed,
    "cache": Cached,
    "a hook that changes the output": Hooked,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(6, 6)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3)),
    "sparse": lambda: Looked(sparse=True),
}


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_chance_and_caches_are_no_difference(devices: str, name: str) -> None:
    torch.manual_seed(0)
    region, x = DataParallel(RANDOM[name](), devices), torch.randn(7, 6)
    state = {key: value.clone() for key, value in region.state_dict().items()}
    before = torch.get_rng_state()
    assert compare_split(region, x) == []
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in region.parameters())
    assert all(torch.equal(value, state[key]) for key, value in region.state_dict().items())


def test_the_generators_of_python_and_numpy_are_left_as_they_were() -> None:
    region = DataParallel(Trains(lambda x: x * 2 if random.random() + np.random.rand() < 1 else x), "cpu*2")

    def left_alone() -> bool:
        before = random.getstate(), np.random.get_state()[2]
        compare_split(region, torch.randn(8, 6))
        return (random.getstate(), np.random.get_state()[2]) == before

    # A thread that a library left running may draw from the same generators now and then.
    assert any(left_alone() for _ in range(5))


def test_random_numbers_of_others_are_said_not_to_be_comparable() -> None:
    region = DataParallel(Trains(lambda x: x + torch.from_numpy(np.random.rand(len(x), 1)).float()), "cpu*2")
    (found,) = compare_split(region, torch.randn(8, 6))
    assert (found.breaks, found.where) == (False, "its output")
    assert "random numbers that are not torch's" in found.problem
    check_split(region, torch.randn(8, 6))


class Retrieves(nn.Module):
    """Scores each query against all documents, which are ids: nothing tells them from samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4)

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        return (self.embedding(queries) @ self.embedding(documents).T).logsumexp(1)


def test_as_many_documents_as_samples_are_found() -> None:
    region, ids = DataParallel(Retrieves(), "cpu*2"), torch.arange(12)
    with pytest.raises(
        UserError, match=r"computes across the batch(?s:.)*wrap what all samples share in Whole"
    ):
        check_split(region, ids[:6], ids[6:])
    check_split(region, ids[:6], Whole(ids[6:]))
    support, x = (
        DataParallel(Does(lambda support, x: torch.cdist(x, support).amin(1)), "cpu*3"),
        torch.randn(6, 3),
    )
    with pytest.raises(UserError, match="computes across the batch"):
        check_split(support, x, x + 1)


class Attention(nn.Module):
    """The gradient of the key's bias is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(len(x), 3, 2) for layer in (self.q, self.k, self.v))
        return ((q @ k.transpose(1, 2)).softmax(-1) @ v).flatten(1)


class Sorted(nn.Module):
    """Packs the batch by length, longest first, and puts it back in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + x.argmax(1) % 3
        order = lengths.argsort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 3, 2)[order], lengths[order], True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], True, total_length=3)
        return out[order.argsort()]


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.layers(x).sum(1)
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def reversed_in_backward(x: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda grad: -grad)
    return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, out = self.gate(x).softmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (weights.argmax(1) == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return out


class Follows(nn.Module):
    """Has a layer whose weights follow those of another, which is right where they are changed in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer, self.slow, self.in_place = nn.Linear(6, 6), nn.Linear(6, 6), in_place
        self.slow.load_state_dict(self.layer.state_dict())
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
            if self.in_place:
                slow.lerp_(fast.detach(), 0.1)
            else:
                slow.data = slow.data.lerp(fast.detach(), 0.1)
        return self.layer(x) - self.slow(x)


ALONE: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "a bias before a norm": lambda: nn.Sequential(
        nn.Linear(6, 6), nn.Unflatten(1, (6, 1)), nn.Linear(1, 4), nn.GroupNorm(6, 6)
    ),
    "sorted inside": Sorted,
    "forces": Forces,
    "gradient reversal": lambda: Trains(reversed_in_backward),
    "experts": Experts,
    "reentrant checkpoint": lambda: Head(lambda x: checkpoint(torch.tanh, x, use_reentrant=True)),
    "weights that follow": lambda: Follows(True),
    "complex": lambda: Trains(torch.fft.rfft),
    "rrelu": lambda: nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Linear(6, 6)),
    "distributions": lambda: Trains(lambda x: torch.distributions.Beta(x.exp(), x.exp() + 1).rsample()),
    "a loss of another type": lambda: Trains(lambda x: x.double().square().mean(1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("devices", ["cpu*2", "cpu*3"])
@pytest.mark.parametrize("name", ALONE)
def test_what_trains_alike_split_and_unsplit_raises_no_alarm(
    name: str, devices: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    region, x = DataParallel(ALONE[name](), devices).to(dtype), torch.randn(7, 6, dtype=dtype)
    before = {key: value.clone() for key, value in region.state_dict().items()}
    region(x)
    region.load_state_dict(before)
    grads = {name: torch.ones_like(parameter) for name, parameter in region.named_parameters()}
    for key, parameter in region.named_parameters():
        parameter.grad = grads[key]
    assert compare_split(region, x) == []
    assert compare_split(region, x.requires_grad_()) == []
    assert x.grad is None
    for key, parameter in region.named_parameters():
        assert parameter.grad is grads[key]
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    for key, value in region.state_dict().items():
        assert torch.equal(value, before[key])


class Keeps(nn.Module):
    """Divides by what it holds and then writes there; `held` is made by a function, `write` changes it."""

    def __init__(self, held: Any, write: Callable[[Any, float], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.write, self.read = nn.Linear(6, 6), write, read
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) / (1 + self.read(self.held))
        new = self.write(self.held, float(out.detach().abs().mean()))
        if new is not None:
            self.held = new
        return out


def number(held: Any) -> float:
    return 0.0


WRITES: dict[str, Callable[[], nn.Module]] = {
    "a number": lambda: Keeps(0.0, lambda held, z: held + z, float),
    "a number that is not read": lambda: Keeps(0, lambda held, z: held + 1, number),
    "a dict": lambda: Keeps({"a": 0.0}, lambda held, z: held.update(a=z), lambda held: held["a"]),
    "a list": lambda: Keeps([0.0], lambda held, z: held.append(z), sum),
    "a list of lists": lambda: Keeps({"a": [[]]}, lambda held, z: held["a"][0].append(z), number),
    "a set": lambda: Keeps(set(), lambda held, z: held.add(z), number),
    "a deque": lambda: Keeps(deque([0.0], 4), lambda held, z: held.append(z), sum),
    "an array": lambda: Keeps(np.zeros(1), lambda held, z: held.__setitem__(0, z), lambda held: held[0]),
    "an object": lambda: Keeps(
        SimpleNamespace(a=0.0), lambda held, z: setattr(held, "a", held.a + z), lambda held: held.a
    ),
    "tensors in a list": lambda: Keeps([torch.zeros(1)], lambda held, z: held[0].add_(z) and None, number),
    "modules": lambda: Keeps(
        nn.ModuleList(), lambda held, z: held.append(nn.Identity()) and None, lambda held: len(held)
    ),
    "a module outside of the tree": lambda: Keeps(
        [nn.BatchNorm1d(1)], lambda held, z: held[0].running_mean.add_(z) and None, number
    ),
    "a parameter": lambda: Keeps(
        nn.Parameter(torch.zeros(1)), lambda held, z: nn.Parameter(held.detach() + z), torch.detach
    ),
    "a parameter's data": lambda: Keeps(
        nn.Parameter(torch.zeros(1)), lambda held, z: held.data.add_(z) and None, torch.detach
    ),
}


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize("name", WRITES)
def test_state_is_found_in_whatever_holds_it(name: str, devices: str) -> None:
    torch.manual_seed(0)
    module = WRITES[name]()
    region = DataParallel(nn.Sequential(nn.Tanh(), module), devices)
    before = copy.deepcopy(module.held)
    (found,) = compare_split(region, torch.randn(7, 6) * torch.arange(1, 8)[:, None])
    where = r"1\.held \[self\.[01]" if name == "modules" else r"1 \[self\.held"
    assert re.match(rf"BREAKS  {where}\]: forward (writes|makes) .* replicas .*lose ", found.text())
    assert same(module.held, before)


class BuiltLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None:
            self.last = nn.Linear(x.shape[1], 1)
        return self.last(x)


def test_a_layer_that_the_first_forward_builds_is_found() -> None:
    region, x = DataParallel(BuiltLate(), "cpu*2"), torch.randn(7, 6)
    with pytest.raises(UserError, match=r"last \[self.weight\]: forward makes this parameter(?s:.)*__init__"):
        check_split(region, x)
    assert region.module.last is None
    region.module(x)
    check_split(region, x)


def test_a_model_with_parameters_without_a_size_is_refused_and_left_alone() -> None:
    model, x = nn.Sequential(nn.LazyLinear(6), DataParallel(nn.Linear(6, 2), "cpu*2")), torch.randn(7, 6)
    with pytest.raises(UserError, match="0.weight has no size yet; call the model with a sample first"):
        check_split(model, x)
    model(x)
    check_split(model, x)


def test_weights_that_follow_others_are_compared_after_a_step() -> None:
    (found,) = compare_split(DataParallel(Follows(False), "cpu*2"), torch.randn(7, 6))
    assert (found.breaks, found.module, found.where) == (True, "slow", "self.weight")


class CentredLate(nn.Module):
    """Centres the batch of its second call; `grad` divides the gradient of its input by the rows."""

    def __init__(self, devices: str, late: bool) -> None:
        super().__init__()
        self.before, self.late = nn.Linear(6, 6), late
        self.block = DataParallel(Does(self.inside), devices)

    @staticmethod
    def inside(x: Tensor, how: str) -> Tensor:
        if how == "grad":
            x.register_hook(lambda grad: grad / len(grad))
        return x - x.mean(0) if how == "centre" else x * 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.before(x), "")
        return self.block(x, "centre") if self.late else self.block(x, "grad")


@pytest.mark.parametrize("devices", ["cpu*2", "cpu*3"])
def test_all_calls_and_the_gradients_of_inputs_are_compared(devices: str) -> None:
    x = torch.randn(7, 6)
    (found,) = compare_split(CentredLate(devices, late=True), x)
    assert (found.module, found.where) == ("block", "its output")
    (found,) = compare_split(CentredLate(devices, late=False), x)
    assert (found.module, found.where) == ("block", "the gradient of its input 0")
    assert "it computes across the batch" in found.problem


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (
            DataParallel(nn.Linear(6, 6), "cpu*3"),
            DataParallel(nn.Linear(6, 6), "cpu*3"),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_what_was_not_compared_is_said() -> None:
    region = DataParallel(nn.Softmax(0), "cpu*3")
    (found,) = compare_split(region, torch.randn(1, 6))
    assert (found.breaks, found.where) == (False, "not compared")
    with pytest.raises(UserError, match=r"compared nothing:(?s:.)*its batch has 1 row(?s:.)*at least 3 rows"):
        check_split(region, torch.randn(1, 6))
    with pytest.raises(UserError, match="computes across the batch"):
        check_split(region, torch.randn(2, 6))
    (found,) = compare_split(Beside(), torch.randn(7, 6))
    assert (found.module, found.problem) == ("unused", "the model does not call it with this batch")
    check_split(Beside(), torch.randn(7, 6))


def test_parameters_that_a_first_batch_sets_are_found_and_left_alone() -> None:
    module = nn.Linear(6, 6)

    def start(part: nn.Module, args: tuple[Tensor]) -> None:
        if not part.bias.data.any():
            part.bias.data.copy_(-args[0].mean(0))

    nn.init.zeros_(module.bias)
    module.register_forward_pre_hook(start)
    (found,) = compare_split(DataParallel(module, "cpu*2"), torch.randn(7, 6))
    assert found.breaks
    assert not module.bias.any()


class Shifted(torch.autograd.Function):
    """Computes each sample alone, and across the batch in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_compared_as_exactly_as_their_type_is(dtype: torch.dtype) -> None:
    x = torch.randn(64, 6, dtype=dtype)
    for function, expected in ((Shifted.apply, ["the gradient of layer.weight"]), (torch.tanh, [])):
        found = compare_split(DataParallel(Trains(function).to(dtype), "cpu*3"), x)
        assert [one.where for one in found] == expected
    assert (
        compare_split(DataParallel(Trains(lambda x: x / 0 * 0), "cpu*2").to(dtype), x) == []
    )  # NaN both ways


SAMPLES = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


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


def test_a_comparison_changes_no_list_no_buffer_and_no_tensor() -> None:
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


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sum()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


SHARED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
    "weights that are summed": (weighted, SAMPLES, torch.rand(8)),
    "weights of the features": (torch.mul, torch.randn(2, 2), torch.rand(2)),
    "normalised weights": (lambda x, w: x * w.softmax(0)[:, None], SAMPLES, torch.rand(8)),
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
def test_a_shared_tensor_is_found_or_fails_in_the_module(name: str, devices: str) -> None:
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


def test_a_tensor_of_the_samples_passes() -> None:
    def loss(x: Tensor, weight: Tensor, labels: Tensor, flags: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, reduction="none") * weight * flags

    region = DataParallel(nn.Sequential(nn.BatchNorm1d(3)), "cpu*2")
    assert region(SAMPLES).shape == SAMPLES.shape
    given = SAMPLES, torch.rand(8), torch.arange(8) % 3, torch.rand(8) > 0.5
    torch.testing.assert_close(DataParallel(Does(loss), "cpu*2")(*given), loss(*given))
    assert compare_split(region, SAMPLES) == compare_split(DataParallel(Does(loss), "cpu*2"), *given) == []
