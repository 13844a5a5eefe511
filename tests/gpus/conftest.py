"""A folder of leases, and the GPUs that a stand-in for NVML describes (`machine` of each file)."""

from pathlib import Path

import pytest

from dphybrid.gpus.inventory import Inventory
from dphybrid.gpus.leases import lease_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return lease_folder(tmp_path / "leases")


@pytest.fixture
def fake(machine: Path) -> Inventory:
    return Inventory("tests.fake_nvml")
