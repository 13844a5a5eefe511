"""A sweep over a grid of values. All cells are checked before the first run starts; each cell is trained in
its own process, which leases its own GPUs."""

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SerializeAsAny

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.recipes.configs import AnyExperiment, apply_overrides
from dphybrid.run.folder import changed_values, check_run_name
from dphybrid.run.leasing import expected_devices, num_at_once
from dphybrid.run.train import Report
from dphybrid.tracking.base import SWEEP_TAG
from dphybrid.tracking.files import FILES
from dphybrid.tracking.opening import embedded_uri
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import read_json, write_json, write_text
from dphybrid.util.stop import StopRequest
from dphybrid.util.text import flag_text

Reports = Mapping[str, Report | str]
"""The result of each run of a sweep, by name: its report, or a text that says why there is none."""
MAX_CELLS = 256
PRUNED = "pruned"
"""First word of the text about a run that a search ended early."""
_END_S = 25.0
"""How long a cell's process may take to write its checkpoint when the sweep has to stop. Less than the 30
seconds after which Prefect kills a cancelled flow run."""


class Cell(BaseModel):
    """One run of a sweep. values: the values that the sweep gives it, as text by field."""

    name: str
    values: dict[str, str]
    config: SerializeAsAny[AnyExperiment]


class CellFailed(Exception):
    """A cell's process ended without a result. final: trying again cannot help."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(text)
        self.final = final


def make_grid(
    config: ExperimentConfig, grid: Mapping[str, Sequence[object]], sweep: str, settings: Settings
) -> list[Cell]:
    """Return a cell for each combination of the grid's values over `config`, the last field changing fastest.

    grid: config field -> its values. Raises UserError, naming the cell, for unknown fields, values that are
    not allowed, and devices that do not exist.
    """
    if not grid or not all(grid.values()):
        raise UserError('grid: give at least one field with values, such as {"train.batch_size": [256, 512]}')
    count = 1
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            ranges = "; a range needs --trials" if isinstance(values, Mapping) else ""
            raise UserError(f"grid: {name} = {values!r}; give a list of values{ranges}")
        count *= len(values)
    if count > MAX_CELLS:
        raise UserError(f"grid: {count:,} combinations, at most {MAX_CELLS} are allowed; give fewer values")
    cells = []
    for number, combination in enumerate(itertools.product(*grid.values()), start=1):
        chosen = dict(zip(grid, combination, strict=True))
        suffix = _name_suffix({field: flag_text(chosen[field]) for field in grid if len(grid[field]) > 1})
        # Zero-padded numbers, so that names sort in the grid's order.
        name = f"{sweep}-{number:0{len(str(count))}d}{suffix}"
        try:
            cells.append(make_cell(config, chosen, name, settings))
        except UserError as error:
            raise UserError(f"grid: cell {number} {error}") from error
    return cells


def make_cell(config: ExperimentConfig, values: Mapping[str, object], name: str, settings: Settings) -> Cell:
    """Return one run of a sweep. Raises UserError, naming the values, for values that are not allowed and for
    devices that do not exist."""
    # The names of the config, which MLflow's params have, too: a field may be given as `train.batch-size`.
    chosen = {field.replace("-", "_"): flag_text(value) for field, value in values.items()}
    shown = [f"{field}={value}" for field, value in chosen.items()]
    try:
        made = apply_overrides(config, shown)
        expected_devices(made, settings)
    except UserError as error:
        raise UserError(f"({', '.join(shown)}): {error}") from error
    return Cell(name=name, values=chosen, config=made)


def _name_suffix(chosen: Mapping[str, str]) -> str:
    """Return the end of a cell's name, made of its values: `-cpux8-b512-lr0.01`."""
    short = {"devices": "", "train.batch_size": "b"}
    words = (short.get(name, name.rpartition(".")[2]) + value for name, value in chosen.items())
    return "".join(f"-{re.sub(r'[^A-Za-z0-9._+-]', '', word.replace('*', 'x'))}" for word in words)[:80]


def run_cell(
    cell: Cell,
    folder: Path,
    settings: Settings,
    sweep: str,
    tags: Mapping[str, str],
    stop: StopRequest,
    enough: Callable[[], bool] = lambda: False,
) -> Report:
    """Train a cell in its own process, from its checkpoint if it has one; return its report. A cell with a
    report is not trained again. The process writes its output to `folder`/NAME.log.

    stop: passed on to the process, which then writes a checkpoint. enough: called repeatedly; when it returns
    True, the process is ended in the same way. Raises CellFailed with the last lines of the output.
    """
    report = folder / f"{cell.name}.json"
    if report.is_file():
        return Report.read(report)
    if stop.pending:
        raise CellFailed(f"{cell.name}: not run, {stop.reason}", final=True)
    page, log = folder / f"{cell.name}.config.json", folder / f"{cell.name}.log"
    write_text(page, cell.config.model_dump_json(indent=1))
    # One process per run: CUDA frees all of its memory at the process's end, and a crash ends only this run.
    argv = [sys.executable, "-P", "-m", "dphybrid", "train", "--config", str(page), "--report", str(report)]
    for name, value in {**tags, SWEEP_TAG: sweep}.items():
        argv += ["--tag", f"{name}={value}"]
    # An interrupted cell continues from its checkpoint; its run has the cell's name.
    known = (settings.runs_dir / cell.name / "run.json").is_file()
    argv += ["--resume", cell.name] if known else ["--run-name", cell.name]
    # Append: keep the output of earlier attempts.
    with log.open("ab") as stream:
        child = subprocess.Popen(argv, stdout=stream, stderr=stream)
        _wait(child, lambda: stop.pending or enough())
    if code := child.returncode:
        # The last lines are the cell's error message, or the end of its traceback.
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        text = f"{cell.name} ended with {code}: {' | '.join(lines[-3:])} ({log})"
        # 2 is the exit code for wrong values: another attempt would fail in the same way.
        raise CellFailed(text, final=code == 2 or stop.pending)
    return Report.read(report)


def sweep_folder(sweep: str, settings: Settings) -> Path:
    """Return the folder of a sweep's logs and results."""
    return settings.data_dir / "sweeps" / sweep


def _wait(child: "subprocess.Popen[bytes]", ends: Callable[[], bool]) -> None:
    """Wait for a process. When `ends` returns True, ask it to stop; kill it if it does not stop in time."""
    while child.poll() is None and not ends():
        time.sleep(0.2)
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def begin_sweep(sweep: str, cells: Sequence[Cell], settings: Settings, at_once: int = 0) -> tuple[Path, int]:
    """Create a sweep's folder; return it and how many runs train at once. at_once: 0 for as many as GPUs
    allow.

    Raises UserError for a name of the sweep, or of a run, that cannot name a folder, for an existing sweep
    whose runs have other values, and for `at_once` below 0.
    """
    check_run_name(sweep, "--sweep")
    if at_once < 0:
        raise UserError(f"at_once={at_once}: give the number of runs, or 0 for as many as GPUs allow")
    folder = sweep_folder(sweep, settings)
    for cell in cells:
        check_run_name(cell.name, "--sweep: its run")  # longer than the sweep's name
        page = folder / f"{cell.name}.config.json"
        if page.is_file() and (changed := changed_values(read_json(page), cell.config)):
            differences = "; ".join(map(": ".join, changed.items()))
            raise UserError(
                f"--sweep {sweep}: its run {cell.name} has other values ({differences}); give the same ones, "
                "or choose another name for this sweep"
            )
    folder.mkdir(parents=True, exist_ok=True)
    workers = at_once or min(len(cells), num_at_once([cell.config for cell in cells], settings))
    print(f"Sweep {sweep}: {counted(len(cells), 'run')}, {workers} at once; logs in {folder}", flush=True)
    return folder, workers


def run_grid(
    cells: Sequence[Cell], sweep: str, settings: Settings, stop: StopRequest, at_once: int = 0
) -> Reports:
    """Run each of a grid's cells in its own process; return by name the cell's report, or why it failed.
    Raises UserError as `begin_sweep` does."""
    folder, workers = begin_sweep(sweep, cells, settings, at_once)

    def train(cell: Cell) -> Report | str:
        try:
            return run_cell(cell, folder, settings, sweep, {}, stop)
        except CellFailed as failure:
            return str(failure)

    # Threads are enough: they only wait for the cells' processes.
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip([cell.name for cell in cells], pool.map(train, cells), strict=True))


def write_sweep(folder: Path, cells: Sequence[Cell], reports: Reports) -> tuple[list[dict[str, Any]], Path]:
    """Write `sweep.json`: for each cell its values, and its run's metrics or the reason for its failure.
    Return the rows and the file."""
    rows = []
    for cell in cells:
        done = reports.get(cell.name, "not run")
        row: dict[str, Any] = {"cell": cell.name, **cell.values, "failed": ""}
        more = {"failed": done} if isinstance(done, str) else {**done.metrics, "run": done.run_url}
        rows.append(row | more)
    write_json(file := folder / "sweep.json", rows)
    return rows, file


def in_mlflow(reports: Reports) -> list[str]:
    """Return the ids of the runs that MLflow has recorded, in the order of the runs' names."""
    done = [report for _, report in sorted(reports.items()) if isinstance(report, Report)]
    return [report.run_id for report in done if report.run_id and report.tracking_uri != FILES]


def compare_sweep(cells: Sequence[Cell], reports: Reports, sweep: str, settings: Settings) -> str:
    """Compare the sweep's runs that are in MLflow on a page in the sweep's folder, and log the page to
    MLflow. Return its address there, "" if there are fewer than two such runs."""
    run_ids = in_mlflow(reports)[-MAX_CELLS:]  # a search may have more runs than fit on a page
    if len(run_ids) < 2:
        return ""
    # Imported here, because these import MLflow, which a sweep itself does not need.
    from dphybrid.tracking.compare import log_comparison, read_runs
    from dphybrid.tracking.compare_page import write_comparison

    uri, folder = settings.mlflow_uri or embedded_uri(settings.mlflow_dir), sweep_folder(sweep, settings)
    page = write_comparison(read_runs(uri, run_ids), folder / "comparison", next(iter(cells[0].values)))
    _, address = log_comparison(uri, settings.experiment, settings.mlflow_dir, page, run_ids, sweep)
    print(f"Comparison: {page.absolute().as_uri()}, and in MLflow: {address}", flush=True)
    return address


def failures(reports: Reports) -> dict[str, str]:
    """Return by name why cells failed. Runs that a search pruned did not fail."""
    texts = {name: done for name, done in reports.items() if isinstance(done, str)}
    return {name: text for name, text in texts.items() if not text.startswith(PRUNED)}
