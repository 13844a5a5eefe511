"""The cases of torch's own tests of DataParallel, on two virtual devices: each comes to what the bare module
gives, or is refused by name."""

import copy
import gc
import io
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.parallel import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter
from dphybrid.util.errors import UserError

TWO = "cpu*2"
CASES: dict[str, Callable[[], None]] = {}
GRADCHECKS = (torch.autograd.gradcheck, torch.autograd.gradgradcheck)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Does(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@case
def a_buffer_that_requires_a_gradient() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)
            self.register_buffer("shift", scale.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift

    scale, x = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(2, 6, dtype=torch.float64)
    region = DataParallel(Scaled(scale), TWO)
    torch.autograd.gradcheck(lambda _: region(x), (scale,))


@case
def an_lstm_that_flattens_its_weights() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(5, 7, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            self.rnn.flatten_parameters()
            out: Tensor = self.rnn(x)[0]
            return out

    bare = Recurrent().double()
    region = DataParallel(copy.deepcopy(bare), TWO)
    x = torch.ones(4, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        region(x)
    for module in (bare, region):
        optimizer = torch.optim.SGD(module.parameters(), lr=10.0)
        module(x).square().mean().backward()
        optimizer.step()
    for one, two in zip(bare.parameters(), region.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@case
def parallel_apply_of_tuples_and_of_bare_arguments() -> None:
    modules, inputs = [nn.Linear(4, 2), nn.Linear(4, 2)], [torch.randn(2, 4), torch.randn(2, 4)]
    for given in ([(x,) for x in inputs], inputs):
        for out, module, x in zip(parallel_apply(modules, given, None), modules, inputs, strict=True):
            assert torch.equal(out, module(x))


@case
def parallel_apply_under_autocast() -> None:
    modules, inputs = [nn.Linear(4, 2), nn.Linear(4, 2)], [torch.randn(2, 4), torch.randn(2, 4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = parallel_apply(modules, inputs, None, mode="threads")
        assert all(torch.equal(one, m(x)) for one, m, x in zip(out, modules, inputs, strict=True))
    assert out[0].dtype == torch.bfloat16


@case
def parallel_apply_passes_an_exception_on() -> None:
    broken = Does(lambda *_: {}["wonderful"])
    with pytest.raises(KeyError, match="wonderful") as caught:
        parallel_apply((broken, broken), (None, None))
    assert caught.value.__notes__ == ["in replica 0 of 2 on cpu[0]"]


@case
def several_inputs_a_number_and_a_keyword() -> None:
    module = Does(lambda a, b, factor, c=None: factor * (a * b + (0 if c is None else c)))
    a, b = (torch.randn(5, 5, requires_grad=True) for _ in range(2))
    for kwargs in ({}, {"c": torch.randn(5, 5)}):
        expected = module(a, b, 0.3, **kwargs)
        grads = torch.autograd.grad(expected.sum(), (a, b))
        for devices in (TWO, "cpu"):
            for out in (
                data_parallel(module, (a, b, 0.3), devices, module_kwargs=kwargs),
                DataParallel(module, devices)(a, b, 0.3, **kwargs),
            ):
                assert torch.equal(out, expected)
                found = torch.autograd.grad(out.sum(), (a, b))
                assert all(torch.equal(one, two) for one, two in zip(found, grads, strict=True))


@case
def a_function_call_that_needs_a_gradient_of_a_small_module() -> None:
    module, x = nn.Linear(10, 5), torch.randn(20, 10)
    torch.testing.assert_close(data_parallel(module, x, TWO), module(x))


@case
def parameters_that_are_elsewhere() -> None:
    region = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), TWO)
    region.module[1].to("meta")
    with pytest.raises(UserError, match="weight of module '1' is on meta, and parameters live on cpu"):
        region(torch.randn(2, 2))


@case
def no_reference_cycles() -> None:
    gc.collect()
    region = DataParallel(nn.Sequential(nn.Linear(1, 1)), TWO, probe=False)
    region(torch.randn(2, 1))
    gc.collect()
    region(torch.randn(2, 1))
    assert gc.collect() == 0


@case
def no_gradients_inside_where_none_are_wanted_outside() -> None:
    seen: list[bool] = []
    module = Does(lambda x: (seen.append(torch.is_grad_enabled()), x)[1])
    for mode in ("inline", "serial", "threads"):
        with torch.no_grad():
            DataParallel(module, TWO, mode=mode, probe=False)(torch.randn(20, 2))  # type: ignore[arg-type]
    assert seen == [False] * 6


@case
def outputs_and_gradients_of_a_linear_layer() -> None:
    module, x = nn.Linear(10, 5).double(), torch.randn(20, 10, dtype=torch.float64)
    expected = module(x)
    expected.sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    out = data_parallel(module, x, TWO)
    out.sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close([p.grad for p in module.parameters()], grads)
    torch.testing.assert_close(data_parallel(module, x), expected)


@case
def sparse_gradients_of_an_embedding() -> None:
    module, ids = nn.Embedding(10, 5, sparse=True), torch.randint(10, (20, 5))
    module(ids).sum().backward()
    expected = module.weight.grad
    module.weight.grad = None
    data_parallel(module, ids, TWO).sum().backward()
    assert module.weight.grad.is_sparse
    assert torch.equal(module.weight.grad.to_dense(), expected.to_dense())


def _nested(x: Tensor) -> Any:
    return [x, (x.sin(), x.cos(), [x.add(1)]), x, OrderedDict(a=x, b=[x.sin()])]


@case
def a_nested_output() -> None:
    x = torch.randn(2, 2)
    out = data_parallel(Does(_nested), x, TWO)
    torch.testing.assert_close(out, _nested(x), rtol=0, atol=0)
    assert [type(part) for part in out] == [Tensor, tuple, Tensor, OrderedDict]
    assert [type(part) for part in out[1]] == [Tensor, Tensor, list]


@case
def a_nested_input() -> None:
    x = torch.randn(20, 3)
    assert torch.equal(
        data_parallel(Does(lambda *i: i[1][0]), (x.cos(), (x.sin(), x), x.sin()), TWO), x.sin()
    )


class Named(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, data: dict[str, Any]) -> Tensor:
        out: Tensor = self.layer(data["data"])
        return out


@case
def every_floating_type_and_keywords_with_empty_containers() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        module, x = nn.Linear(10, 5).to(dtype), torch.randn(20, 10).to(dtype)
        tolerance = {"rtol": 0.0, "atol": 1e-2 if dtype.itemsize == 2 else 1e-5}
        torch.testing.assert_close(DataParallel(module, TWO)(x), module(x), **tolerance)
        region = DataParallel(Named(module), TWO)
        for more in ({}, {"unused": []}, {"unused": {}}, {"unused": ()}):
            torch.testing.assert_close(region(data={"data": x, **more}), module(x), **tolerance)


@case
def devices_as_objects_and_an_output_device() -> None:
    module, x, cpu = nn.Linear(10, 5), torch.randn(20, 10, requires_grad=True), torch.device("cpu")
    for given in ({"device_ids": TWO, "output_device": cpu}, {"device_ids": (cpu,), "output_device": -1}):
        torch.testing.assert_close(data_parallel(module, x, **given), module(x))


@case
def a_gradient_penalty() -> None:
    module, x = nn.Linear(4, 1), torch.ones(2, 4, requires_grad=True)
    region = DataParallel(module, TWO)
    out = region(x)
    (grads,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    grads.mean().backward()
    assert torch.equal(module.weight.grad, torch.full((1, 4), 0.25))
    assert module.bias.grad is None or torch.equal(module.bias.grad, torch.zeros(1))


@case
def scatter_and_its_second_derivatives() -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    one, two = scatter(x, TWO)
    assert torch.equal(one, x[:2])
    assert torch.equal(two, x[2:])
    one.backward(torch.full_like(one, 2.0))
    assert torch.equal(x.grad, torch.tensor([2.0, 2, 0, 0], dtype=torch.float64)[:, None].expand(4, 4))
    assert all(check(lambda y: tuple(scatter(y, TWO)), (x,)) for check in GRADCHECKS)


@case
def gather_and_its_second_derivatives() -> None:
    inputs = tuple(torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.equal(gather(inputs, -1), torch.cat(inputs))
    assert all(check(lambda x, y: gather((x, y), -1), inputs) for check in GRADCHECKS)


@case
def gather_of_numbers() -> None:
    inputs = tuple(torch.randn((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    with pytest.raises(UserError, match='a 0-dim tensor has no dim 0 to join on.*gather="concat"'):
        gather(inputs, -1)
    assert torch.equal(gather(inputs, -1, joining="concat"), torch.stack(inputs))
    assert all(check(lambda x, y: gather((x, y), -1, joining="concat"), inputs) for check in GRADCHECKS)


@case
def gather_of_dicts_of_different_lengths() -> None:
    one = torch.randn(1, 2)
    with pytest.raises(ValueError, match="replicas returned dicts with different keys"):
        gather(({"a": one}, {"b": one, "a": one}), -1)


@case
def replicas_compute_what_the_module_does() -> None:
    module, x = nn.Linear(10, 5), torch.randn(2, 10)
    assert all(torch.equal(replica(x), module(x)) for replica in replicate(module, TWO))
    holder = nn.Module()
    holder.bn = nn.BatchNorm2d(10)
    for replica in replicate(holder, TWO):
        assert torch.equal(replica.bn.running_var, holder.bn.running_var)


@case
def clearing_gradients_in_a_replica_warns() -> None:
    class Clears(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with pytest.warns(UserWarning, match=r"Calling .zero_grad\(\) from a module created with"):
                self.zero_grad()
            return x

    DataParallel(Clears(), TWO)(torch.rand(4, 3, 6, 5))


@case
def autocast_in_the_forward() -> None:
    class Cast(nn.Linear):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    for mode in ("inline", "threads"):
        out = DataParallel(Cast(8, 8), TWO, mode=mode)(torch.randn(8, 8))  # type: ignore[arg-type]
        assert out.dtype == torch.bfloat16


@case
def replicas_can_be_saved() -> None:
    for detach in (False, True):
        torch.save(replicate(nn.Linear(8, 8), TWO, detach), io.BytesIO())


@case
def gradients_keep_the_layout_of_their_parameters() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        bare = nn.Sequential(nn.Conv2d(4, 6, 2), nn.Conv2d(6, 4, 2)).to(memory_format=layout)
        region = DataParallel(copy.deepcopy(bare), TWO)
        x = torch.randn(6, 4, 5, 5)
        for module, _ in itertools.product((bare, region), range(2)):
            F.mse_loss(module(x), torch.zeros(6, 4, 3, 3)).backward()
        for one, two in zip(bare, region.module, strict=True):
            assert two.weight.grad.is_contiguous(memory_format=layout)
            torch.testing.assert_close(one.weight.grad, two.weight.grad, rtol=1e-4, atol=1e-6)


@case
def lists_and_dicts_of_parameters() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ones = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
            self.named = nn.ParameterDict(
                {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3))}
            )

        def forward(self, x: Tensor) -> Tensor:
            held = [*self.ones, *self.named.values()]
            assert len(self.ones) == len(self.named) == 2
            return x * torch.stack(held).sum(0)

    held = Held()
    out = DataParallel(held, TWO)(torch.ones(4, 3))
    assert torch.equal(out, torch.full((4, 3), 4.0))
    out.sum().backward()
    assert all(torch.equal(p.grad, torch.full((3,), 4.0)) for p in held.parameters())


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    CASES[name]()
