"""Each kernel of a forward serves a step that trains, where it may read its tensors; elsewhere torch's
operations compute. Predictions are always theirs."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import dphybrid.kernels as kernels
from dphybrid.embedding import HostEmbedding
from dphybrid.kernels import is_plain, may_read, may_train
from dphybrid.recipes.ctr.numbers import EmbeddedBins
from dphybrid.recipes.ctr.pairs import Pairs
from tests.conftest import REPOSITORY

EDGES_NE = torch.linspace(-1, 1, 9).repeat(2, 1)
IDS_BF = torch.tensor([[0, 1], [2, 0], [2, 1]])

Case = tuple[Callable[[], nn.Module], tuple[Tensor, ...]]
COMPUTING: dict[str, Case] = {
    "pairs": (lambda: Pairs(4), (torch.randn(3, 4, 5).requires_grad_(),)),
    "pairs with a first": (lambda: Pairs(5), (torch.randn(3, 4, 5), torch.randn(3, 5).requires_grad_())),
    "numbers": (lambda: EmbeddedBins(EDGES_NE, 4), (torch.randn(3, 2),)),
}
READING: dict[str, Case] = {
    "table": (lambda: HostEmbedding(3, 2, seed=0), (IDS_BF,)),
}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were called."""
    names: list[str] = []
    call = kernels.call
    monkeypatch.setattr(kernels, "call", lambda name, given: names.append(name) or call(name, given))
    return names


@contextmanager
def autocast_of(kind: str) -> Iterator[None]:
    # Not torch.autocast, which does nothing for a device that is not here.
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, False)


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., object]:
    def call(module: nn.Module, *given: Tensor) -> object:
        with context():
            return module(*given)

    return call


def faked(module: nn.Module, *given: Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return module(*map(mode.from_tensor, given))


def of_meta(module: nn.Module, *given: Tensor) -> object:
    return module.to("meta")(*(each.to("meta") for each in given))


def traced(module: nn.Module, *given: Tensor) -> object:
    return torch.jit.trace(module, given, check_trace=False)


def recorded(module: nn.Module, *given: Tensor) -> object:
    return make_fx(module)(*given)


def compiled(module: nn.Module, *given: Tensor) -> object:
    return torch.compile(module, backend="eager")(*given)


def exported(module: nn.Module, *given: Tensor) -> object:
    return torch.export.export(module, given)


def with_tangents(module: nn.Module, *given: Tensor) -> object:
    def of(*given: Tensor) -> Tensor:
        return functional_call(module, dict(module.named_buffers()), given)

    return jvp(of, given, tuple(torch.ones_like(each) for each in given))


def with_dual_numbers(module: nn.Module, *given: Tensor) -> object:
    with forward_ad.dual_level():
        return module(*(forward_ad.make_dual(each, torch.ones_like(each)) for each in given))


def in_batches(module: nn.Module, *given: Tensor) -> object:
    return vmap(module)(*(each.expand(2, *each.shape) for each in given))


WATCHED = {
    "fake": faked, "trace": traced, "compile": compiled, "export": exported, "make_fx": recorded,
    "dispatch mode": within(lambda: FlopCounterMode(display=False)),
}  # fmt: skip
UNRECORDED = {
    "evaluation": lambda module, *given: module.eval()(*given),
    "no_grad": within(torch.no_grad),
    "inference": within(torch.inference_mode),
}
OTHERWISE = {
    "autocast on the CPU": within(lambda: autocast_of("cpu")),
    "autocast on a GPU": within(lambda: autocast_of("cuda")),
    "float64": lambda module, *given: module.double()(*(each.double() for each in given)),
    "meta": of_meta, "vmap": in_batches, "jvp": with_tangents, "forward derivative": with_dual_numbers,
}  # fmt: skip


@pytest.mark.parametrize("name", [*COMPUTING, *READING])
def test_a_step_that_trains_is_served_by_kernels(called: list[str], name: str) -> None:
    make, given = (COMPUTING | READING)[name]
    make()(*given)
    assert called


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("how", [*WATCHED, *UNRECORDED, *OTHERWISE])
def test_elsewhere_torchs_operations_compute(called: list[str], name: str, how: str) -> None:
    make, given = COMPUTING[name]
    torch.manual_seed(0)
    module = make()
    found = (WATCHED | UNRECORDED | OTHERWISE)[how](module, *given)
    assert not called
    if how in UNRECORDED or "GPU" in how:  # the bits of predictions
        assert torch.equal(found, module.eval()(*given))


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("how", WATCHED)
def test_tables_call_no_kernel_where_torch_looks_on(called: list[str], name: str, how: str) -> None:
    make, given = READING[name]
    module = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing is deprecated
        WATCHED[how](module, *given)
    assert not called or how == "compile"  # a lookup is outside of its graphs


def odd_tensors() -> Iterator[tuple[str, Tensor]]:
    whole = torch.ones(3, 3)
    yield "meta", whole.to("meta")
    yield "negated", torch._neg_view(whole)
    yield "zero", torch._efficientzerotensor((3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layouts in development
        yield "nested", torch.nested.nested_tensor([whole, whole])
        yield "jagged", torch.nested.nested_tensor([whole, whole], layout=torch.jagged)
        yield "sparse", whole.to_sparse()
        yield "compressed", whole.to_sparse_csr()
    yield "oneDNN's", whole.to_mkldnn()
    yield "a subclass", whole.as_subclass(type("Named", (Tensor,), {}))
    with FakeTensorMode():
        yield "fake", torch.ones(3, 3)


@pytest.mark.parametrize(("kind", "odd"), [pytest.param(*each, id=each[0]) for each in odd_tensors()])
def test_only_values_in_host_memory_as_strides_say_are_read(kind: str, odd: Tensor) -> None:
    plain = torch.ones(3, 3, requires_grad=True)
    assert not is_plain(odd)
    assert may_read(plain)
    assert may_train(plain)
    assert not may_read(plain, odd)
    assert not may_train(plain, odd)
    with pytest.raises(TypeError, match="no memory on the host"):
        kernels.address(odd, "it", torch.float32, (3, 3))


def test_plain_tensors_are_those_of_any_origin() -> None:
    with torch.inference_mode():
        made = torch.ones(3)
    for each in (made, torch.ones(3).share_memory_(), torch.ones(3)[::2], nn.Parameter(torch.ones(3))):
        assert is_plain(each)


def test_the_question_is_asked_in_one_place_by_those_tried_here() -> None:
    asked, by_hand = set(), set()
    for file in (REPOSITORY / "dphybrid").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file.parent.name == "kernels":
            continue
        if re.search(r"\bmay_(read|train)\(", text):
            asked.add(file.relative_to(REPOSITORY / "dphybrid").as_posix())
        if re.search(r"_len_torch_dispatch_stack|_get_tracing_state|_has_storage|is_functorch_wrapped", text):
            by_hand.add(file.name)
    assert asked == {"embedding/table.py", "recipes/ctr/numbers.py", "recipes/ctr/pairs.py"}
    assert not by_hand
