"""Any nest of inputs is split and joined without loss."""

import dataclasses
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dphybrid.parallel import DataParallel, gather, resolve_devices, scatter, split_sizes
from dphybrid.parallel.nests import map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: Any
    name: str = "kept"


def nests(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.builds(Pair, inner, inner),
            st.builds(Record, inner),
        ),
        max_leaves=6,
    )


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if dataclasses.is_dataclass(one):
        return type(one) is type(two) and same(vars(one), vars(two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def tensors(rows: int) -> st.SearchStrategy[Any]:
    return st.integers(1, 3).map(lambda width: torch.arange(float(rows * width)).view(rows, width))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 20), st.integers(1, 8))
def test_scatter_then_gather_gives_the_nest_back(data: st.DataObject, rows: int, devices: int) -> None:
    nest = data.draw(nests(st.one_of(tensors(rows), st.none())))
    sizes = split_sizes(rows, devices)
    parts = scatter(nest, resolve_devices(f"cpu*{devices}"), sizes=sizes)
    assert len(parts) == len(sizes)

    def without_names(value: Any) -> Any:  # a text cannot be joined
        if isinstance(value, Record):
            return [without_names(value.value)]
        if isinstance(value, Pair):
            return Pair(*map(without_names, value))
        if isinstance(value, dict):
            return {key: without_names(item) for key, item in value.items()}
        return type(value)(map(without_names, value)) if isinstance(value, tuple | list) else value

    assert same(gather([without_names(part) for part in parts], "cpu"), without_names(nest))


def no_op(*_: Any) -> None:
    """In the place of what would call the module once more."""


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 20), st.integers(1, 8))
def test_whatever_is_no_tensor_reaches_every_replica(data: st.DataObject, rows: int, devices: int) -> None:
    nest = data.draw(
        nests(st.one_of(tensors(rows), st.none(), st.integers(), st.text(max_size=3), st.booleans()))
    )
    flag = data.draw(st.one_of(st.none(), st.booleans(), st.text(max_size=3)))
    seen: list[Any] = []

    class Look(nn.Module):
        def forward(self, x: Tensor, nest: Any, *, flag: Any = "unset") -> Tensor:
            seen.append((nest, flag))
            map_tensors(lambda t: check(len(t) == len(x)), nest)
            return x

    def check(good: bool) -> None:
        assert good

    x = torch.arange(float(rows))[:, None]
    with patch.multiple(
        "dphybrid.parallel.data_parallel", refuse_chance_rows=no_op, refuse_shared_inputs=no_op
    ):
        assert torch.equal(DataParallel(Look(), f"cpu*{devices}")(x, nest, flag=flag), x)
    assert len(seen) == len(split_sizes(rows, devices))
    assert {repr(flag)} == {repr(found) for _, found in seen}
