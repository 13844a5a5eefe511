"""Dropout whose masks do not depend on the split: bits, gradients, and where torch's own takes over."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from dphybrid import kernels
from dphybrid.parallel import DataParallel, Dropout, Whole, parallel_apply

SPLITS = ["cpu", "cpu*2", "cpu*3", "cpu*8", "cpu*16"]


def zeros(value: Tensor) -> Tensor:
    return value == 0


def masks_of(module: nn.Module, devices: str, x: Tensor, calls: int = 2) -> list[Tensor]:
    torch.manual_seed(5)
    region = DataParallel(copy.deepcopy(module), devices)
    return [zeros(region(x)) for _ in range(calls)]


class Flattens(nn.Module):
    """Drops rows that are flattened with another dim, as an output layer over tokens does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Dropout(0.3), Dropout(0.6)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.second(self.first(x_BTD)) + x_BTD / 8
        return self.second(self.first(x_BTD.flatten(0, 1))).unflatten(0, x_BTD.shape[:2])


@pytest.mark.parametrize("rows", [13, 16, 3, 1])
def test_masks_do_not_depend_on_the_split(rows: int) -> None:
    x = torch.ones(rows, 4, 5)
    one, *others = [masks_of(Flattens(), devices, x) for devices in SPLITS]
    assert all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[1]), "each call draws anew"


def test_training_with_dropout_is_the_same_for_any_number_of_devices() -> None:
    """Float64: what is left are sums in another order."""
    trained = []
    for devices in SPLITS:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), Dropout(0.4), nn.Linear(9, 1)).double()
        region, data = DataParallel(net, devices), torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(region.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            region(torch.randn(11, 6, dtype=torch.float64, generator=data)).square().mean().backward()
            optimizer.step()
        trained.append((torch.cat([p.detach().flatten() for p in net.parameters()]), torch.rand(1)))
    for weights, next_draw in trained[1:]:
        torch.testing.assert_close(weights, trained[0][0], rtol=1e-12, atol=1e-14)
        assert torch.equal(next_draw, trained[0][1]), "the generator went equally far"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (2, 3, 4), (513, 129)])
def test_kept_values_are_scaled_and_the_gradient_has_the_mask(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    y = Dropout(0.25)(x)
    assert y.shape == x.shape
    assert y.dtype is dtype
    assert torch.equal(y[~zeros(y)], torch.full_like(y, 1 / 0.75)[~zeros(y)])
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_of_zeros_is_p_in_rows_columns_and_pairs(p: float) -> None:
    torch.manual_seed(0)
    off = (zeros(Dropout(p)(torch.ones(2048, 512))).double() - p) / (p * (1 - p)) ** 0.5
    assert abs(float(off.mean())) * off.numel() ** 0.5 < 4
    for dim in (0, 1):
        of_lines = off.mean(dim) * off.shape[dim] ** 0.5  # about normal(0, 1)
        assert abs(float(of_lines.std()) - 1) < 0.15
        for lag in (1, 2, 8, 64):
            there, here = off.narrow(dim, 0, off.shape[dim] - lag), off.narrow(dim, lag, off.shape[dim] - lag)
            assert abs(float((there * here).sum())) / there.numel() ** 0.5 < 5


def test_bits_depend_neither_on_the_team_nor_on_the_processor() -> None:
    """Threads here; the long form compares digests of other processors."""
    x, before, masks = torch.ones(3000, 200), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            masks.append(Dropout(0.5)(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    torch.manual_seed(1)
    assert torch.equal(Dropout(0.5)(x[:, :7]), masks[0][:, :7])


def test_derivatives_of_all_kinds() -> None:
    x, drop = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), Dropout(0.4)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return drop(x)

    assert torch.autograd.gradcheck(seeded, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(seeded, x)


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_computes_the_same_mask_again(devices: str, reentrant: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(lambda x: self.drop(x.square()), x, use_reentrant=reentrant)
            return x

    region = DataParallel(Twice(), devices)
    x = torch.rand(9, 200, dtype=torch.float64).add_(0.5).requires_grad_()
    y = region(x)
    y.sum().backward()
    assert x.grad is not None
    # y is 8 x^4 or 0, so its derivative is 4 y / x; another mask in backward would give other zeros
    torch.testing.assert_close(x.grad, 4 * y.detach() / x.detach())
    shares = zeros(y)[:6].chunk(2)
    assert not torch.equal(*shares)


def test_replicas_called_by_hand_and_in_threads_have_the_masks_of_one_device() -> None:
    drop, x = Dropout(0.5), torch.ones(9, 300)
    torch.manual_seed(3)
    whole = drop(x)
    for mode in ("inline", "threads"):
        torch.manual_seed(3)
        shares = parallel_apply([drop] * 3, list(x.split(4)), devices="cpu*3", mode=mode)  # type: ignore[arg-type]
        assert torch.equal(torch.cat(shares), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_ends_are_torchs(p: float) -> None:
    x = torch.randn(4, 5)
    assert torch.equal(Dropout(p)(x), x * (1 - p))


def test_it_is_a_dropout_elsewhere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms, traces and compiled graphs get torch's own, and no kernel is called while they look on."""
    drop, x = Dropout(0.5), torch.ones(50, 40)
    assert torch.equal(drop.eval()(x), x)
    assert repr(drop.train()) == "Dropout(p=0.5, inplace=False)"
    with pytest.raises(ValueError, match="dropout probability"):
        Dropout(1.5)
    monkeypatch.setattr(kernels, "call", lambda *_: pytest.fail("the kernel was called"))
    tangent = grad(lambda x: functional_call(drop, {}, x).sum())(x)
    assert set(tangent.unique().tolist()) == {0.0, 2.0}
    assert vmap(drop, randomness="different")(x).shape == x.shape
    traced = torch.jit.trace(drop, x, check_trace=False)
    assert not torch.equal(traced(x), traced(x))
    with torch.device("meta"):
        assert drop(torch.ones(3)).is_meta
    graph = torch.fx.experimental.proxy_tensor.make_fx(drop)(x)
    assert "bernoulli" in graph.code or "dropout" in graph.code


def test_a_compiled_module_drops() -> None:
    net = torch.compile(nn.Sequential(nn.Linear(4, 300), Dropout(0.5)), backend="aot_eager", fullgraph=True)
    y = net(torch.ones(6, 4))
    assert 0.3 < float(zeros(y).double().mean()) < 0.7


class Second(nn.Module):
    """Drops its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = Dropout(0.5)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(x) * first.sum()
        return dropped


@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("devices", SPLITS[1:4])
def test_masks_and_record_are_of_the_batch_whatever_comes_first(devices: str, dim: int) -> None:
    x, found = torch.ones(9, 9, 4, dtype=torch.float64), []
    for where in ("cpu", devices):
        region = DataParallel(Second(), where, dim=dim)
        torch.manual_seed(0)
        found.append([region(Whole(torch.ones(3, 3)), x), region(torch.ones(()), x)])
        rows = [size[dim] for split in region.splits() for size in split.input_sizes]
        assert sum(rows) == 9
        assert len(region.splits()) == 1
        assert {tuple(size) for split in region.splits() for size in split.output_sizes} == {
            tuple(size) for split in region.splits() for size in split.input_sizes
        }
    for one, split in zip(*found, strict=True):
        assert torch.equal(one, split)
        assert 0 < int((one == 0).sum()) < one.numel()
    given = x.clone().requires_grad_()
    out = DataParallel(Second(), devices, dim=dim)(torch.ones(()), given)
    out.sum().backward()
    assert torch.equal(given.grad, out.detach())
