"""`check_split` names the module that computes across the batch, and raises no alarm for others."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import DataParallel, Whole, check_split
from dphybrid.parallel.comparison import notes_on
from dphybrid.util.errors import UserError
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
    lambda x: x.sort(0).values,
    lambda x: x + torch.arange(len(x))[:, None],
    lambda x: torch.zeros_like(x).index_add_(0, torch.arange(len(x)) % 2, x),
]


@pytest.mark.parametrize(
    ("make", "module", "devices"),
    [
        *((partial(Head, function), "1.after: its input", "cpu*3") for function in ACROSS),
        (Contrastive, "1: its output", "cpu"),
        (BatchSecond, "1.attention: its output", "cpu*3"),
        (partial(nn.Softmax, 0), "1: its output", "cpu"),
    ],
)
def test_the_module_that_computes_across_the_batch_is_named(
    devices: str, make: Callable[[], nn.Module], module: str
) -> None:
    torch.manual_seed(0)
    region = DataParallel(nn.Sequential(nn.Linear(6, 6), make()), devices)
    model = nn.Sequential()
    model.region = region
    with pytest.raises(UserError, match=rf"region\.{module} differs"):
        check_split(model, torch.randn(7, 6))
    assert region.splits() == []


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


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: Trains(lambda x: x - x.mean(0)), "its output"),
        (lambda: nn.Sequential(nn.Linear(6, 6), Codebook()), "self.codes"),
        (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True)),
         "self.running_mean"),
        (lambda: Looked(scale_grad_by_freq=True), "embedding.weight: its gradient"),
        (Counted, "its output"),
    ],
)  # fmt: skip
def test_what_only_training_does_across_the_batch_is_found(make: Callable[[], nn.Module], place: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UserError, match=place):
        check_split(DataParallel(make(), "cpu*4"), torch.randn(8, 6))


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


class Attention(nn.Module):
    """The gradient of the key's bias is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(len(x), 3, 2) for layer in (self.q, self.k, self.v))
        return ((q @ k.transpose(1, 2)).softmax(-1) @ v).flatten(1)


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.layers(x).sum(1)
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


ALIKE: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Dropout1d(0.5), nn.RReLU()),
    "noise": lambda: Trains(lambda x: x + torch.randn_like(x) * torch.rand(len(x), 1)),
    "attention with dropout": Attends,
    "recurrent": Recurs,
    "checkpointed": Checkpointed,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3)),
    "sparse": lambda: Looked(sparse=True),
    "a key's bias, whose gradient is rounding": Attention,
    "forces": Forces,
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_trains_alike_split_and_unsplit_raises_no_alarm(name: str) -> None:
    torch.manual_seed(0)
    region, x = DataParallel(ALIKE[name](), "cpu*3"), torch.randn(7, 6)
    before = {key: value.clone() for key, value in region.state_dict().items()}
    grads = {parameter: torch.ones_like(parameter) for parameter in region.parameters()}
    for parameter, grad in grads.items():
        parameter.grad = grad
    states = torch.get_rng_state(), random.getstate()
    assert check_split(region, x.requires_grad_()).startswith("the same results")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert x.grad is None
    assert all(parameter.grad is grad for parameter, grad in grads.items())
    assert all(torch.equal(value, before[key]) for key, value in region.state_dict().items())
    assert region.training


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.LSTM(3, 3)), "0 (LSTM) expects the batch on dim 1"),
        (nn.TransformerEncoderLayer(4, 2, 8), "self_attn (MultiheadAttention) expects"),
        (nn.BatchNorm1d(3), "the module (BatchNorm1d) normalises each device's rows by themselves"),
    ],
)
def test_layers_that_a_split_changes_have_a_note(module: nn.Module, words: str) -> None:
    (note,) = notes_on(module)
    assert words in note


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_tables_share_their_rows_with_the_copies_and_are_compared(devices: str) -> None:
    class Looks(nn.Module):
        def __init__(self, across: bool) -> None:
            super().__init__()
            self.table, self.across = HostEmbedding(50, 6, seed=1), across
            self.inside = DataParallel(Inside(), devices)
            self.region = DataParallel(nn.Linear(6, 2), devices)

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.region(self.region.rows(self.table, ids))
            return rows + self.inside(ids, rows.mean() if self.across else Whole(rows.mean()))

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = HostEmbedding(50, 2, seed=1)

        def forward(self, ids: Tensor, shift: Tensor) -> Tensor:
            return self.table(ids) + shift

    model, ids = Looks(across=True), torch.arange(7) * 3
    before = [weight.detach().clone() for weight in model.parameters()]
    assert check_split(model, ids).startswith("the same results")
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())
    model(ids).sum().backward()
    assert sorted(model.table.weight.grad.coalesce().indices()[0].tolist()) == ids.tolist()


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
    with pytest.raises(UserError, match=r"last\.weight: its gradient differs"):
        check_split(region, x)
    assert region.module.last is None
    region.module(x)
    check_split(region, x)


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


def test_all_calls_and_the_gradients_of_inputs_are_compared() -> None:
    x = torch.randn(7, 6)
    with pytest.raises(UserError, match="block: its output in call 2 differs"):
        check_split(CentredLate("cpu*3", late=True), x)
    with pytest.raises(UserError, match=r"before\.(weight|bias): its gradient differs"):
        check_split(CentredLate("cpu*3", late=False), x)


def test_what_was_not_compared_is_said() -> None:
    region = DataParallel(nn.Softmax(0), "cpu*3")
    assert "not compared: no DataParallel was called with two rows" in check_split(region, torch.randn(1, 6))
    with pytest.raises(UserError, match="contains no DataParallel"):
        check_split(nn.Softmax(0), torch.randn(5, 3))


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
    with pytest.raises(UserError, match=r"layer\.weight: its gradient differs"):
        check_split(DataParallel(Trains(Shifted.apply).to(dtype), "cpu*3"), x)
    check_split(DataParallel(Trains(torch.tanh).to(dtype), "cpu*3"), x)


SAMPLES = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sum()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


SHARED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
    "weights that are summed": (weighted, SAMPLES, torch.rand(8)),
    "weights of the classes": (
        lambda x, w: F.cross_entropy(x, x.argmax(1), w, reduction="none"),
        torch.randn(8, 8),
        torch.rand(8),
    ),
    "a mask that would be broadcast": (masked, torch.randn(2, 2, 6), torch.ones(2, 2).tril().bool()),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_tensor_is_found(name: str) -> None:
    (function, x, shared), devices = SHARED[name], "cpu*2"
    with pytest.raises(UserError, match=r"wrap what all samples share in Whole|fails when split"):
        check_split(DataParallel(Does(function), devices), x, shared)
    region = DataParallel(Does(function), devices)
    torch.testing.assert_close(region(x, Whole(shared)), function(x, shared))
    check_split(region, x, Whole(shared))
