"""Compare runs on one page: speed, time of each stage, curves, values that differ.

examples:
  %(prog)s text-cpu-1121-044553 text-cpux2-1121-045901
  %(prog)s --experiment dphybrid --group-by devices
  %(prog)s --sweep nightly --group-by table.optimizer --log
  %(prog)s --sweep nightly --text
"""

from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from dphybrid.cli.parser import Command
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError


class Flags(Command):
    """The flags of `compare`."""

    shown_as: ClassVar[dict[str, str]] = {
        "experiment": "NAME",
        "sweep": "ID",
        "group_by": "NAME",
        "out": "FOLDER",
    }
    runs: CliPositionalArg[list[str]] = Field(default=[], alias="RUN")
    """MLflow ids or names of runs."""
    experiment: str | None = None
    """Experiment of the runs; without RUN: its newest 24 finished runs."""
    sweep: str | None = None
    """Compare the runs of this sweep."""
    group_by: str = "devices"
    """Group runs by devices, or by a param such as train.batch_size."""
    out: Path = Path("comparison")
    """Folder of the page, index.html."""
    text: bool = False
    """Only print the comparison, write no page."""
    log: bool = False
    """Also log the page to MLflow, as a separate run."""

    def run(self) -> int:
        """Print a comparison of runs and write it as a page."""
        from dphybrid.tracking import compare
        from dphybrid.tracking.compare_page import text_of, write_comparison
        from dphybrid.tracking.opening import store_to_read

        settings = load_settings()
        experiment = self.experiment or settings.experiment
        if not self.runs and self.sweep is None and self.experiment is None:
            raise UserError("name runs to compare, or --experiment NAME, or --sweep ID (see --help)")
        if self.runs and self.sweep is not None:
            raise UserError(f"--sweep {self.sweep}: give a sweep or runs ({' '.join(self.runs)}), not both")
        # `--out page.html` means a file; nobody would look for the page in a folder of that name.
        if self.out.suffix in (".html", ".htm") or (self.out.exists() and not self.out.is_dir()):
            raise UserError(f"--out {self.out}: name a folder; the page is its index.html")
        uri = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
        run_ids = compare.find_runs(uri, experiment, self.runs, self.sweep)
        runs = compare.read_runs(uri, run_ids)
        print(text_of(runs, self.group_by))
        if self.text:
            return 0
        page = write_comparison(runs, self.out, self.group_by)
        print(f"{len(run_ids)} runs: {page.absolute().as_uri()}")
        if self.log:
            run_id, _ = compare.log_comparison(
                uri, experiment, settings.mlflow_dir, page, run_ids, self.sweep
            )
            print(f"Recorded as run {run_id}")
        return 0
