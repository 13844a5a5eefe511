"""A sweep on stand-in GPUs: cells at once, a failed one tried again and reported, one page at the end."""

import functools
import os
from pathlib import Path

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.sweep import Sweep
from dphybrid.recipes.configs import build_config, load_config
from flows.sweep_hybrid import sweep_hybrid
from tests.fake_nvml import stand_in

FACTORY = """
import os, pathlib
from dphybrid.tutorials.model import build_hybrid

def build(context):
    marks = pathlib.Path(os.environ["MARKS"])
    if context.options.dim == 8:
        (marks / f"try-{os.getpid()}").touch()
        if len(list(marks.iterdir())) == 1:
            raise RuntimeError("the first try fails")
    if context.options.dim == 9:
        (marks.parent / f"hopeless-{os.getpid()}").touch()
        raise RuntimeError("always fails")
    return build_hybrid(context)
"""


def test_a_grid_has_a_cell_for_each_combination(data_dir: Path) -> None:
    config, settings = build_config({"recipe": "hybrid", "devices": "cpu"}), load_settings()
    sweep = Sweep("s", config, {"train.epochs": [1, 2], "table.lr": [0.1, 0.2]})
    grid = [sweep.config_of(values, settings) for values in sweep.cells()]
    assert [(c.train.epochs, c.table.lr) for c in grid] == [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2)]
    endless = sweep.config_of({"train.clip_norm": "inf"}, settings)
    data_dir.mkdir()
    (page := data_dir / "page.json").write_text(endless.model_dump_json())  # as a cell's process reads it
    assert load_config(page, []) == endless


@pytest.mark.nightly
def test_a_sweep_runs_at_once_and_tries_again(
    tmp_path: Path,
    data_dir: Path,
    embedded_store: None,
    prefect_server: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "swept.py").write_text(FACTORY)
    stand_in(monkeypatch, tmp_path, 3)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    grid = {"model.dim": [7, 8, 9], "devices": ["auto*1"]}
    overrides = ["recipe=hybrid", "train.epochs=1", "model.factory=swept:build"]
    sweep = functools.partial(sweep_hybrid.with_options(log_prints=False), sweep="widths", return_state=True)
    state = sweep(grid=grid, overrides=overrides)
    assert (state.message or "").startswith("2 of 3 runs failed: widths-002 ended with 1: ")
    state = sweep(grid=grid, overrides=overrides)  # only those that failed are trained again
    assert (state.message or "").startswith("1 of 3 runs failed: widths-003 ended with 1: ")
    told = capsys.readouterr().out
    assert "Sweep widths: 3 runs, 3 at once" in told
    assert len(list(marks.iterdir())) == 2
    assert len(list(tmp_path.glob("hopeless-*"))) == 2
    folder = tmp_path / "data" / "sweeps" / "widths"
    assert len(list(folder.glob("widths-*.json"))) == 3, "a config of each run"
