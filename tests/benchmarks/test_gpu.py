"""The measurement for GPUs, rehearsed without one."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu


def test_a_rehearsal_measures_every_part_and_way_and_says_that_it_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"rows_each": 200, "columns": 3, "dim": 8, "batch_size": 64}
    run = gpu.run
    monkeypatch.setattr(gpu, "run", lambda rounds, devices: run(rounds, devices, **small))
    out = tmp_path / "gpu.json"
    gpu.main(["--repeats", "2", "--devices", "cpu*2", "--out", str(out)])
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "nothing about GPUs" in shown
    assert found["rehearsal"] is True
    measured = found["devices"]["cpu*2"]
    parts = {"sort", "gather", "to the devices", "device", "from the devices", "update"}
    assert measured["parts_ms"].keys() == parts
    assert {"off", "exact", "torch, sparse gradients", "torch, dense gradients"} == measured["step_ms"].keys()
    assert all(value > 0 for group in measured.values() for value in group.values())
    ratio = measured["step_ms"]["off"] / measured["step_ms"]["exact"]
    assert measured["ratios"]["off / exact"] == pytest.approx(ratio)
