"""Splits are right, results equal those without any splitting, and what cannot be split is refused."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

from dphybrid.parallel import (
    DataParallel,
    device_count,
    parallel_apply,
    resolve_devices,
    split_sizes,
)
from dphybrid.util.errors import UserError


@pytest.mark.parametrize(
    ("devices", "full", "last"),
    [(1, [30], [10]), (2, [15, 15], [5, 5]), (3, [10] * 3, [4, 4, 2]), (8, [4] * 7 + [2], [2] * 5)],
)
def test_splits_are_those_of_pytorchs_tutorial(devices: int, full: list[int], last: list[int]) -> None:
    wrapped = DataParallel(nn.Linear(5, 2), f"cpu*{devices}")
    for batch, rows in zip(torch.randn(100, 5).split(30), [full] * 3 + [last], strict=True):
        wrapped(batch)
        assert wrapped.last_split is not None
        assert wrapped.last_split.input_sizes == tuple((count, 5) for count in rows)
        assert wrapped.last_split.output_sizes == tuple((count, 2) for count in rows)
    assert [split.count for split in wrapped.splits()] == [3, 1]
    assert json.loads(json.dumps(asdict(wrapped.splits()[1])))["input_sizes"] == [[n, 5] for n in last]


def test_split_sizes_are_those_of_chunk() -> None:
    for rows in range(1, 100):
        for devices in range(1, 12):
            assert split_sizes(rows, devices) == [len(part) for part in torch.arange(rows).chunk(devices)]


def test_an_empty_batch_runs_once() -> None:
    assert DataParallel(nn.Linear(5, 2), "cpu*3")(torch.empty(0, 5)).shape == (0, 2)


def test_threads_see_the_callers_modes_and_number_of_threads() -> None:
    seen: list[tuple[bool, bool, torch.dtype, int]] = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            seen.append((*modes, torch.get_autocast_dtype("cpu"), torch.get_num_threads()))
            return x

    devices, before = resolve_devices("cpu*2"), torch.get_num_threads()
    try:
        for number in (2, 3):  # the pool's threads last
            torch.set_num_threads(number)
            with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
                parallel_apply([Look(), Look()], [(torch.ones(1),)] * 2, [{}] * 2, devices, mode="threads")
            assert seen == [(False, True, torch.float16, number)] * 2
            seen.clear()
    finally:
        torch.set_num_threads(before)


def test_devices_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_DEVICES", "cpu*3")
    assert device_count() == 3
    assert len(DataParallel(nn.Linear(3, 3)).devices) == 3
    assert len(DataParallel(nn.Linear(3, 3), "cpu*2").devices) == 2
    monkeypatch.setenv("DPHYBRID_DEVICES", "gpu7")
    with pytest.raises(UserError, match="cannot read 'gpu7'"):
        DataParallel(nn.Linear(3, 3))
