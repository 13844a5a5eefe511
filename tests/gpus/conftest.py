"""A folder of leases, and the GPUs that a stand-in for NVML describes (`machine` of each file)."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from dphybrid.gpus import leases
from dphybrid.gpus.inventory import Inventory
from dphybrid.gpus.leases import Holder, lease_folder


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LOOK_EVERY_S", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return lease_folder(tmp_path / "leases")


@pytest.fixture
def fake(machine: Path) -> Inventory:
    return Inventory("tests.fake_nvml")


def waits(folder: Path, fake: Inventory, numbers: Iterable[int], least: int, run: str = "") -> ExitStack:
    """Hold the ticket of a run that waits for `least` of these GPUs, until the end of the `with` block."""
    queued, units = ExitStack(), fake.read()
    uuids = frozenset(units[number].uuid for number in numbers)
    leases._take_ticket(folder, Holder.own(run, uuids, least), queued)
    return queued
