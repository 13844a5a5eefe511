"""A grid of runs: its cells, each checked before any starts, and running one in a process of its own, which
leases its own GPUs."""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SerializeAsAny

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.gpus import Inventory, visible
from dphybrid.gpus.leasing import expected_devices, wanted_spec
from dphybrid.recipes.configs import AnyExperiment, apply_overrides
from dphybrid.run.train import Report
from dphybrid.util.errors import UserError
from dphybrid.util.files import write_json, write_text
from dphybrid.util.stop import StopRequest

SWEEP_TAG = "dphybrid.sweep"
MAX_CELLS = 256
END_S = 25.0
"""How long a cell's process may take to write its checkpoint when the sweep has to stop; Prefect allows 30
seconds."""


class Cell(BaseModel):
    """One run of a sweep. values: its place in the grid, by field."""

    name: str
    values: dict[str, str]
    config: SerializeAsAny[AnyExperiment]


class CellFailed(Exception):
    """A cell's process ended without a result; `final` when trying again cannot help."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(text)
        self.final = final


@dataclass(frozen=True)
class Grid:
    """The cells of a sweep and the field that its comparison is grouped by."""

    cells: list[Cell]
    group_by: str


def make_grid(
    config: ExperimentConfig, grid: Mapping[str, Sequence[object]], sweep: str, settings: Settings
) -> Grid:
    """Return all combinations of the grid's values over `config`, the last field changing fastest.

    grid: config field -> its values. Raises UserError for unknown fields, for values that are not allowed,
    with the cell, and for devices that are not there.
    """
    if not grid or not all(grid.values()):
        raise UserError('grid: give at least one field with values, such as {"train.batch_size": [256, 512]}')
    count = 1
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UserError(f"grid: {name} = {values!r}; give a list of values")
        count *= len(values)
    if count > MAX_CELLS:
        raise UserError(f"grid: {count:,} combinations, {MAX_CELLS} are allowed; give fewer values")
    cells = []
    for number, combination in enumerate(itertools.product(*grid.values()), start=1):
        chosen = {name: _text(value) for name, value in zip(grid, combination, strict=True)}
        try:
            cell = apply_overrides(config, [f"{name}={value}" for name, value in chosen.items()])
            expected_devices(cell, settings)
        except UserError as error:
            shown = ", ".join(f"{name}={value}" for name, value in chosen.items())
            raise UserError(f"grid: cell {number} ({shown}): {error}") from error
        differing = _differing({field: chosen[field] for field in grid if len(grid[field]) > 1})
        name = f"{sweep}-{number:0{len(str(count))}d}{differing}"
        cells.append(Cell(name=name, values=chosen, config=cell))
    return Grid(cells, next(iter(grid)))


def _differing(chosen: Mapping[str, str]) -> str:
    """Return what tells a cell apart, for its name: `-cpux8-b512-lr0.01`."""
    short = {"devices": "", "train.batch_size": "b"}
    words = (
        short.get(name, name.rpartition(".")[2]) + value.replace("*", "x") for name, value in chosen.items()
    )
    return "".join(f"-{re.sub(r'[^A-Za-z0-9._+-]', '', word)}" for word in words)[:80]


def _text(value: object) -> str:
    return (
        ",".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)
    )


def cells_at_once(grid: Grid, settings: Settings) -> int:
    """Return how many cells could hold leases at the same time: GPUs by the fewest that a cell takes; 1 on
    the CPU."""
    units = visible(Inventory(settings.nvml).read(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    specs = [wanted_spec(cell.config, settings) for cell in grid.cells]
    if not units or any("cpu" in spec.names for spec in specs):
        return 1
    everything = settings.max_gpus or len(units)
    least = min(spec.count or len(set(spec.names)) or everything for spec in specs)
    return max(1, min(len(grid.cells), len(units) // least))


def run_cell(
    cell: Cell, folder: Path, settings: Settings, sweep: str, tags: Mapping[str, str], stop: StopRequest
) -> Report:
    """Run a cell in a process of its own, or go on with it, or only read what it came to; its output goes to
    `folder`/NAME.log.

    stop: is handed on to the cell's process, which writes a checkpoint. Raises CellFailed with the end of its
    output.
    """
    report = folder / f"{cell.name}.json"
    if not report.is_file():
        if stop.pending:
            raise CellFailed(f"{cell.name}: not run, {stop.reason}", final=True)
        page, log = folder / f"{cell.name}.config.json", folder / f"{cell.name}.log"
        write_text(page, cell.config.model_dump_json(indent=1))
        argv = [sys.executable, "-m", "dphybrid", "train", "--config", str(page), "--report", str(report)]
        for name, value in {**tags, SWEEP_TAG: sweep}.items():
            argv += ["--tag", f"{name}={value}"]
        known = (settings.runs_dir / cell.name / "run.json").is_file()
        argv += ["--resume", cell.name] if known else ["--run-name", cell.name]
        with log.open("ab") as stream:
            child = subprocess.Popen(argv, stdout=stream, stderr=stream)
            _wait(child, stop)
        if child.returncode:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise CellFailed(
                f"{cell.name} ended with {child.returncode}: {' | '.join(lines[-3:])} ({log})",
                final=child.returncode == 2 or stop.pending,
            )
    return Report.read(report)


def _wait(child: "subprocess.Popen[bytes]", stop: StopRequest) -> None:
    """Wait for a process; end it in good order when the sweep is asked to stop."""
    while child.poll() is None and not stop.pending:
        time.sleep(0.2)
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def sweep_rows(grid: Grid, reports: Mapping[str, Report | str]) -> list[dict[str, Any]]:
    """Return a row a cell for people: its values, and what it came to or why not. reports: cell name ->
    report, or the failure."""
    rows = []
    for cell in grid.cells:
        done = reports.get(cell.name, "not run")
        row: dict[str, object] = {"cell": cell.name, **cell.values}
        rows.append(
            row
            | (
                {"failed": done}
                if isinstance(done, str)
                else {"failed": "", **done.metrics, "run": done.run_url}
            )
        )
    return rows


def write_sweep(folder: Path, rows: list[dict[str, object]]) -> Path:
    """Write the rows as JSON; return the file."""
    file = folder / "sweep.json"
    write_json(file, rows)
    return file
