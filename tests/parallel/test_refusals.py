"""What DataParallel refuses: modules, inputs and outputs, each by name and with the remedy."""

import re
from array import array
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence

from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import DataParallel, gather, parallel_apply, parts
from dphybrid.util.errors import UserError
from tests.parallel.zoo import Does

TWO = "cpu*2"
X = torch.ones(8, 3)
PACKED = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])


class Carrier:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Batch(dict):  # type: ignore[type-arg]
    def __init__(self, x: Tensor) -> None:
        super().__init__(x=x)


def gives(*found: Any) -> None:
    """Return these from the replicas, from the first on."""
    left = list(found)
    DataParallel(Does(lambda x: left.pop(0)), TWO)(X)


def computes(function: Callable[[Tensor], Any]) -> None:
    DataParallel(Does(function), TWO)(torch.randn(8, 3))


def takes(*inputs: Any) -> None:
    DataParallel(Does(lambda *given: given), TWO)(*inputs)


def moved_after_wrapping() -> None:
    region = DataParallel(nn.Linear(3, 3), TWO)
    region.module.to("meta")
    region(X)


def wraps(module: nn.Module | None = None, devices: Any = TWO, **options: Any) -> None:
    DataParallel(module or nn.Linear(3, 3), devices, **options)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: wraps(devices="cuda:97"), "does not exist"),
    (lambda: wraps(output_device="cuda:7"), "output_device='cuda:7' does not exist"),
    (lambda: wraps(nn.Sequential(DataParallel(nn.Identity(), TWO))), "module '0' is data-parallel itself"),
    (
        lambda: wraps(nn.Sequential(torch.compile(nn.Identity(), backend="eager"))),
        "module '0' is compiled, and replicas would run the original's code",
    ),
    (lambda: wraps(nn.LazyLinear(3)), "has parameters without a size yet; run it once on a sample first"),
    (
        lambda: DataParallel(HostEmbedding(8, 2), TWO)(torch.arange(8)),
        "the module is a table; wrap the blocks",
    ),
    (
        lambda: wraps(nn.Sequential(nn.SyncBatchNorm(3))),
        "module '0' is a SyncBatchNorm, which synchronises processes, not replicas",
    ),
    (
        lambda: type("Own", (DataParallel,), {"scatter": lambda *_: None})(nn.Linear(3, 3), TWO),
        "overrides scatter, which is not called here",
    ),
    (
        lambda: takes(torch.ones(6), torch.ones(1)),
        "tensors disagree on their rows (dim 0): input[0]: 6, input[1]: 1 ... share in Whole(...)",
    ),
    (lambda: takes(nested()), "input[0]: a nested or sparse tensor cannot be split"),
    (lambda: takes(PACKED), "a PackedSequence has no batch dim to split on ... pack inside the module"),
    (lambda: takes(row for row in X), "a generator can be read only once, by the first replica"),
    (lambda: takes(X.numpy()), "a ndarray is not split; give torch.from_numpy(...)"),
    (lambda: takes(Carrier(X)), "carries tensors that cannot be split"),
    (lambda: takes(Batch(X)), "a Batch carries tensors that cannot be split ... register the class"),
    (lambda: computes(torch.sum), 'a 0-dim tensor has no dim 0 to join on ... reduction="none"'),
    (lambda: gives({"n": 1.0}, {"n": 2.0}), "output['n']: a float cannot be joined over replicas"),
    (
        lambda: gives(PACKED, PACKED),
        "a PackedSequence has no batch dim to join on ... pad_packed_sequence with total_length",
    ),
    (lambda: gives(X, None), "replicas returned different types, Tensor, NoneType"),
    (
        lambda: computes(lambda x: x.new_ones(2, len(x), 5)),
        "size (2, 4, 5) for a share of 4 samples ... transpose an RNN's state",
    ),
    (
        lambda: gather([nested(), nested()], "cpu"),
        "a nested or sparse tensor cannot be joined",
    ),
    (
        lambda: gather([torch.ones(3, 3), torch.ones(2, 2)], "cpu"),
        "shapes (3, 3), (2, 2) cannot be joined on dim 0",
    ),
    (lambda: takes(torch.eye(4).to_sparse()), "input[0]: a nested or sparse tensor cannot be split"),
    (moved_after_wrapping, "weight of the module is on meta, and parameters live on cpu"),
    (lambda: parallel_apply([nn.Identity()] * 2, [X]), "2 replicas, 1 inputs, kwargs: none"),
    (
        lambda: takes(parts([torch.ones(1), torch.ones(5)])),
        "parts of [1, 5] rows in a batch that is split into [3, 3]",
    ),
    (lambda: DataParallel(nn.Identity(), "cpu")(parts([X, X])), "2 parts for a region with one device"),
    (lambda: DataParallel(nn.Linear, TWO), "a type is not a module"),  # type: ignore[arg-type]
    (lambda: wraps(devices=""), "devices='': cannot read ''"),
    (lambda: wraps(devices=63), "cuda:63 does not exist"),
    (lambda: wraps(devices="cuda:98,cuda:99"), "cuda:98, cuda:99 do not exist"),
    (lambda: gives(1, 1), "output: an int cannot be joined"),
    (
        lambda: DataParallel(nn.Linear(3, 3), TWO).rows(nn.Embedding(9, 3), torch.arange(8)),  # type: ignore[arg-type]
        "an Embedding is not a table; give a HostEmbedding",
    ),
    (lambda: takes([Carrier(X)]), "input[0][0]: a Carrier carries tensors"),
    (lambda: takes(Slotted(X)), "input[0]: a Slotted carries tensors"),
    (lambda: takes(nn.Linear(2, 2)), "input[0]: a Linear carries tensors"),
    (lambda: takes(X, {"w": array("d", [1.0] * 8)}), "w']: a array is not split"),
    (lambda: takes(X, pl.Series([1.0] * 8)), "input[1]: a Series is not split"),
    (lambda: takes(X, pl.DataFrame({"w": [1.0] * 8})), "input[1]: a DataFrame is not split"),
    (lambda: gives({"a": X}, {"b": X}), "output: replicas returned different containers"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG)
def test_it_is_refused_by_name_with_the_remedy(wrong: Callable[[], object], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told).replace(re.escape(" ... "), ".*")):
        wrong()


def test_one_device_needs_no_list() -> None:
    assert DataParallel(nn.Linear(3, 3), torch.device("cpu")).devices.text == "cpu"  # type: ignore[arg-type]


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="mode='thread'"):
        parallel_apply([nn.Linear(3, 3)], [X], mode="thread")  # type: ignore[arg-type]


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_and_traced_modules_are_refused_on_several_devices(make: Any) -> None:
    linear = nn.Linear(4, 2)
    torch.testing.assert_close(DataParallel(make(linear), "cpu")(ROWS), linear(ROWS))
    with pytest.raises(UserError, match="module '0' is scripted or traced.*wrap the module"):
        DataParallel(nn.Sequential(make(linear)), "cpu*2")


def test_max_norm_works_on_one_device_and_is_refused_on_several() -> None:
    ids = torch.arange(4)
    assert DataParallel(nn.Embedding(8, 8, max_norm=1.0), "cpu")(ids).norm(dim=1).max() < 1.001
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(UserError, match="module '0' has max_norm"):
            DataParallel(nn.Sequential(kind(8, 8, max_norm=1.0)), "cpu*2")


def test_a_table_in_distributed_data_parallel_refuses_before_torchs_backward(tmp_path: Any) -> None:
    """One process that believes to be one of two: the forward refuses before anything is sent."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(nn.Sequential(HostEmbedding(9, 4), nn.Linear(4, 1)))
        assert wrapped(torch.arange(4)).shape == (4, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
            with pytest.raises(UserError, match="each of 2 processes would train its own copy"):
                wrapped(torch.arange(4))
            with torch.no_grad():
                wrapped.module(torch.arange(4))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.compile(nn.Linear(3, 3), backend="eager"), "module '1' is compiled"),
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
