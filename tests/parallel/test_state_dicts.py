"""A region's state dict is that of torch's class; names in checkpoints are those of the bare module."""

import pytest
import torch
from torch import nn

from dphybrid.parallel import DataParallel
from dphybrid.training.checkpoint import dense_state


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_files_go_to_and_come_from_torchs_class(devices: str) -> None:
    ours, torchs = DataParallel(made(), devices), nn.DataParallel(made())
    state = {name: torch.rand_like(value.float()) for name, value in torchs.state_dict().items()}
    ours.load_state_dict(state)
    torchs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for name, value in ours.state_dict().items():
        assert name.startswith("module.")
        assert torch.equal(value, torchs.state_dict()[name])
    assert list(ours.state_dict()) == [name for name, _ in (*ours.named_parameters(), *ours.named_buffers())]


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_names_in_checkpoints_lack_the_regions_prefix_alone(devices: str) -> None:
    inner = nn.ModuleDict({"module": made(), "head": nn.Linear(3, 1)})
    bare = nn.ModuleDict({"net": inner, "module": nn.Linear(2, 2)})
    model = nn.ModuleDict({"net": DataParallel(inner, devices), "module": bare["module"]})
    assert list(dense_state(model)) == list(dense_state(bare)) == list(bare.state_dict())
    assert list(dense_state(DataParallel(inner, devices))) == list(inner.state_dict())
