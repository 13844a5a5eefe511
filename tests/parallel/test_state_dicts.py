"""Names, files and parts of a region are those of its module."""

from typing import Any

import pytest
import torch
from torch import nn

from dphybrid.parallel import DataParallel
from dphybrid.util.errors import UserError

SAMPLES = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize("direct", [True, False])
def test_functional_call_takes_the_names_of_the_state_dict(devices: str, direct: bool) -> None:
    def inner() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 3) if direct else made()

    bare, model = nn.Sequential(inner()), nn.Sequential(DataParallel(inner(), devices))
    other = {name: torch.rand_like(value) for name, value in bare.state_dict().items() if value.dim()}
    assert other.keys() <= model.state_dict().keys()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = torch.func.functional_call(bare, other, (SAMPLES,))
    torch.testing.assert_close(torch.func.functional_call(model, other, (SAMPLES,)), expected)
    named = {name.replace("0.", "0.module.", 1): value for name, value in other.items()}
    torch.testing.assert_close(torch.func.functional_call(model, named, (SAMPLES,)), expected)
    for name, value in model.state_dict().items():  # as it was
        assert torch.equal(value, before[name])
        assert torch.equal(model.get_parameter(name) if "weight" in name else value, value)


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Versioned(nn.Module):
    """Its version 1 stored the weight transposed."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, versions: Any, *more: Any) -> None:
        if (versions.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, versions, *more)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("source", "target"), [("cpu*2", "cpu*2"), (None, "cpu*2"), ("cpu", None)])
def test_versions_in_a_state_dict_reach_the_module(
    source: str | None, target: str | None, nested: bool
) -> None:
    def made(devices: str | None) -> nn.Module:
        module: nn.Module = nn.ModuleDict({"module": Versioned()}) if nested else Versioned()
        return nn.ModuleDict({"net": module if devices is None else DataParallel(module, devices)})

    given, found = made(source), made(target)
    state = given.state_dict()
    versions = dict(state._metadata)
    found.load_state_dict(state)
    assert torch.equal(next(given.parameters()), next(found.parameters()))
    assert dict(state._metadata) == versions
    if target is not None:
        found["net"].load_state_dict(given["net"].state_dict())


def test_a_batch_norm_file_that_lacks_a_buffer_is_refused_with_the_keys_of_the_file() -> None:
    state = nn.Sequential(nn.BatchNorm1d(3)).state_dict()
    del state["0.num_batches_tracked"]
    state["0.weight"], state["more"] = torch.ones(4), torch.ones(1)
    with pytest.raises(RuntimeError) as caught:
        DataParallel(nn.Sequential(nn.BatchNorm1d(3)), "cpu*2").load_state_dict(state)
    for words in ('Missing key(s) in state_dict: "0.num_batches_tracked"', '"more"', "mismatch for 0.weight"):
        assert words in str(caught.value)
    assert "module." not in str(caught.value)


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_parts_set_and_removed_on_a_region_are_those_of_its_module(devices: str) -> None:
    module = nn.Sequential()
    module.body, module.fc = nn.Linear(4, 8), nn.Linear(8, 2)
    region = DataParallel(module, devices)
    region.fc = nn.Linear(region.fc.in_features, 10)
    assert region(ROWS).shape == (6, 10)
    assert [name for name, _ in region.named_parameters()][-1] == "module.fc.bias"
    assert region.module.fc.weight.shape == (10, 8)
    linear = DataParallel(nn.Linear(4, 2), devices)
    linear.bias = None
    assert linear.module.bias is None
    assert list(linear.state_dict()) == ["weight"]
    del region.fc
    assert region(ROWS).shape == (6, 8)
    with pytest.raises(UserError, match="the module has no 'head'; set it on the module"):
        region.head = nn.Linear(2, 2)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("more", [True, False])
@pytest.mark.parametrize("form", ["bare", "torch's"])
def test_files_for_a_model_with_a_child_named_module(strict: bool, more: bool, form: str) -> None:
    def make() -> nn.Module:
        net = nn.Module()
        net.module = nn.Linear(3, 3)
        if more:
            net.head = nn.Linear(3, 3)
            net.module.module = nn.Linear(2, 2)
        return net

    source, target = make(), make()
    prefix = "" if form == "bare" else "module."
    state = {f"{prefix}{key}": value for key, value in source.state_dict().items()}
    found = DataParallel(target, "cpu*2").load_state_dict(state, strict=strict)
    assert not found.missing_keys
    assert not found.unexpected_keys
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)
    outer = nn.ModuleDict({"block": DataParallel(make(), "cpu*2")})
    outer.load_state_dict({f"block.{key}": value for key, value in state.items()}, strict=strict)
    for key, value in source.state_dict().items():
        assert torch.equal(outer.state_dict()[f"block.{key}"], value)
