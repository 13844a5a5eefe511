"""A sweep on stand-in GPUs: cells at once, a failed one tried again and reported, one page at the end."""

import json
import re
from pathlib import Path

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.sweep import MAX_CELLS, begin_sweep, compare_sweep, make_grid
from dphybrid.recipes.configs import build_config, load_config
from dphybrid.run.leasing import num_at_once
from dphybrid.run.pages import Report
from flows.sweep_hybrid import sweep_hybrid
from tests.fake_nvml import stand_in
from tests.flows.servers import REPOSITORY
from tests.refusing import refused

FACTORY = """
import os, pathlib
from dphybrid.recipes.tutorial.model import build_hybrid

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
    grid = make_grid(config, {"train.epochs": [1, 2], "table.lr": [0.1, 0.2]}, "s", settings)
    assert [cell.name for cell in grid][::3] == ["s-1-epochs1-lr0.1", "s-4-epochs2-lr0.2"]
    assert [(c.config.train.epochs, c.config.table.lr) for c in grid] == [
        (1, 0.1),
        (1, 0.2),
        (2, 0.1),
        (2, 0.2),
    ]
    assert num_at_once([cell.config for cell in grid], settings) == 1
    folder, _ = begin_sweep("s", grid, settings)
    first = grid[0]
    (folder / f"{first.name}.config.json").write_text(first.config.model_dump_json())
    begin_sweep("s", grid, settings)
    config = build_config({"recipe": "hybrid", "devices": "cpu", "train": {"seed": 3}})
    other = make_grid(config, {"train.epochs": [1, 2], "table.lr": [0.1, 0.2]}, "s", settings)
    with refused(r"--sweep s: its run s-1-epochs1-lr0.1 .*\(train.seed: 0 -> 3\)"):
        begin_sweep("s", other, settings)
    with refused("--sweep: its run '.*use a plain name of at most 200 bytes"):
        begin_sweep("s" * 198, make_grid(config, {"train.seed": [1, 2]}, "s" * 198, settings), settings)
    endless = make_grid(config, {"train.clip_norm": ["inf"]}, "s", settings)[0].config
    (page := data_dir / "page.json").write_text(endless.model_dump_json())  # as a cell's process reads it
    assert load_config(page, []) == endless
    (cell,) = make_grid(config, {"train.batch-size": [64]}, "s", settings)
    assert cell.values == {"train.batch_size": "64"}  # the name of the param, by which runs are compared
    in_files = {name: Report.model_construct(run_id=name, tracking_uri="files") for name in "ab"}
    assert compare_sweep(grid, in_files, "s", settings) == ""  # MLflow has none of them


def test_a_search_of_many_runs_compares_the_last_that_fit_on_a_page(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []

    def read_runs(_: str, run_ids: list[str]) -> list[object]:
        compared.extend(run_ids)
        return []

    monkeypatch.setattr("dphybrid.tracking.compare.read_runs", read_runs)
    monkeypatch.setattr("dphybrid.tracking.compare_page.write_comparison", lambda *_: data_dir / "index.html")
    monkeypatch.setattr("dphybrid.tracking.compare.log_comparison", lambda *_: ("", "there"))
    names = [f"s-{number:03d}" for number in range(1, MAX_CELLS + 45)]
    reports = {name: Report.model_construct(run_id=name, tracking_uri="http://x") for name in reversed(names)}
    grid = make_grid(build_config({"recipe": "hybrid"}), {"train.epochs": [1]}, "s", load_settings())
    assert compare_sweep(grid, reports, "s", load_settings()) == "there"
    assert compared == names[-MAX_CELLS:]


@pytest.mark.slow
def test_a_sweep_runs_at_once_tries_again_and_compares(
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
    stand_in(monkeypatch, tmp_path, 3, GPU_POLL_S=0.1)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{tmp_path}")
    state = sweep_hybrid.with_options(log_prints=False)(
        grid={"model.dim": [7, 8, 9], "devices": ["auto*1"]},
        overrides=["recipe=hybrid", "train.epochs=1", "model.factory=swept:build"],
        sweep="widths",
        return_state=True,
    )
    assert state.is_failed()
    told = capsys.readouterr().out
    assert "Sweep widths: 3 runs, 3 at once" in told
    assert "widths-2-dim8: retrying" in told
    assert re.search(r"widths-3-dim9 ended with 1: .*always fails", told)
    assert len(list(marks.iterdir())) == 2
    assert len(list(tmp_path.glob("hopeless-*"))) == 2
    folder = tmp_path / "data" / "sweeps" / "widths"
    rows = json.loads((folder / "sweep.json").read_text())
    assert [row["model.dim"] for row in rows] == ["7", "8", "9"]
    assert [bool(row["failed"]) for row in rows] == [False, False, True]
    page = (folder / "comparison" / "index.html").read_text()
    assert "widths-1" in page
    assert "widths-2" in page
    assert "widths-3" not in page
