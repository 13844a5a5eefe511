"""The comparison of a batch unsplit with itself split names the module that computes across the batch."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.parallel import DataParallel, Dropout, Whole, check_split, compare_split
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
        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)


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
