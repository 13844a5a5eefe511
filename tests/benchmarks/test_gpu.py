"""What is asked of a machine with a GPU, rehearsed without one, and without the packages that it may lack."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu import SHAPES
from tests.commands import python
from tests.conftest import REPOSITORY
from tests.test_light_install import HIDE

LACKING = '("prefect", "mlflow", "polars", "pydantic", "pydantic_settings", "rich", "sklearn", "matplotlib")'


@pytest.mark.nightly
def test_a_rehearsal_measures_everything_and_says_so(tmp_path: Path) -> None:
    hide = HIDE.replace(HIDE.partition("HIDDEN = ")[2].partition("\n")[0], LACKING)
    assert LACKING in hide
    (tmp_path / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    out = tmp_path / "results.json"
    options = ("--repeats", "2", "--only", "steps,virtual,kernels,memory", "--out", str(out))
    environment = {**os.environ, "PYTHONPATH": path}
    # the tests run in this suite anyway; there they must be found
    python("-m", "pytest", "-n", "0", "--collect-only", "tests/gpu", env=environment, cwd=REPOSITORY)
    done = python("-m", "benchmarks.gpu", *options, env=environment, cwd=tmp_path)
    assert "nothing about GPUs" in done.stdout
    found = json.loads(out.read_text())
    assert found["rehearsal"] is True
    assert found["not installed"] == ["prefect", "mlflow", "polars", "pydantic"]
    assert found["versions"]["torch"]
    assert found["hardware"]["cpu"]
    steps = found["stages"]["steps"]["result"]
    assert steps.keys() == SHAPES.keys()
    for measured in steps.values():
        parts = {"sort", "gather", "to the devices", "device", "from the devices", "update"}
        assert measured["parts_ms"].keys() == parts
        assert {"off", "exact"} < measured["step_ms"].keys()
        assert all(value > 0 for value in (measured["parts_ms"] | measured["step_ms"]).values())
        assert measured["counters"]["prepared_ratio"] > 0
        ratio = measured["step_ms"]["off"] / measured["step_ms"]["exact"]
        assert measured["ratios"]["off / exact"] == ratio
    assert found["stages"]["kernels"]["result"]["cpu"]
    assert found["stages"]["memory"]["result"].keys() > {"without", "off", "exact"}
