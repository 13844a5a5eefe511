"""One run of a sweep: its values, its training in a process of its own, and what became of it."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SerializeAsAny

from dphybrid.config.settings import Settings
from dphybrid.recipes.configs import AnyExperiment
from dphybrid.run.train import Report
from dphybrid.tracking.tracker import FILES
from dphybrid.util.files import write_text
from dphybrid.util.stop import StopRequest

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


class Result(BaseModel):
    """What became of a run of a sweep.

    Attributes:
        report: None if it has no result.
        why: The reason.
        pruned: The search ended it early, which is no failure.
    """

    name: str
    values: dict[str, str]
    report: Report | None = None
    why: str = ""
    pruned: bool = False

    @property
    def row(self) -> dict[str, Any]:
        """The run as a row of a table: its values, and its metrics or why there are none."""
        more = {**self.report.metrics, "run": self.report.run_url} if self.report else {"failed": self.why}
        return {"cell": self.name, **self.values, "failed": "", **more}


Train = Callable[[Cell, Callable[[], bool]], Report]
"""Trains a cell, see `run_cell`: (cell, whether it is enough) -> report."""


def run_cell(
    cell: Cell,
    folder: Path,
    settings: Settings,
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
    for name, value in tags.items():
        argv += ["--tag", f"{name}={value}"]
    # An interrupted cell continues from its checkpoint; its run has the cell's name.
    known = (settings.runs_dir / cell.name / "run.json").is_file()
    argv += ["--resume", cell.name] if known else ["--run-name", cell.name]
    # Append: keep the output of earlier attempts.
    with log.open("ab") as stream:
        child = subprocess.Popen(argv, stdout=stream, stderr=stream)
        asked = _wait(child, lambda: stop.pending or enough())
    if code := child.returncode:
        # The last lines are the cell's error message, or the end of its traceback.
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        text = f"{cell.name} ended with {code}: {' | '.join(lines[-3:])} ({log})"
        # 2 is the exit code for wrong values: another attempt would fail in the same way. One that was asked
        # to end, by a signal or because the search has pruned it, has not failed.
        raise CellFailed(text, final=code == 2 or asked)
    return Report.read(report)


def _wait(child: "subprocess.Popen[bytes]", ends: Callable[[], bool]) -> bool:
    """Wait for a process. When `ends` returns True, ask it to stop; kill it if it does not stop in time.
    Return whether it was asked."""
    asked = False
    while child.poll() is None and not asked:
        asked = ends()
        time.sleep(0 if asked else 0.2)
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return asked


def in_mlflow(results: Sequence[Result]) -> list[str]:
    """Return the ids of the runs that MLflow has recorded, in the order of the runs' names."""
    done = [result.report for result in results if result.report is not None]
    return [report.run_id for report in done if report.run_id and report.tracking_uri != FILES]


def failures(results: Sequence[Result]) -> dict[str, str]:
    """Return by name why runs failed. Runs that a search pruned did not fail."""
    return {result.name: result.why for result in results if result.report is None and not result.pruned}
