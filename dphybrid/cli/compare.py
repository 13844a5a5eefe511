"""Compare runs in a table: metrics, speed, values that differ.

examples:
  %(prog)s text-cpu-1121-044553 text-cpux2-1121-045901
  %(prog)s --experiment dphybrid --group-by devices
  %(prog)s --sweep nightly --group-by table.optimizer
"""

from typing import ClassVar

from pydantic import Field

from dphybrid.cli.parser import Command, Positional
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError


class Flags(Command):
    """The flags of `compare`."""

    shown_as: ClassVar[dict[str, str]] = {
        "experiment": "NAME",
        "sweep": "ID",
        "group_by": "NAME",
    }
    runs: Positional[list[str]] = Field(default=[], alias="RUN")
    """MLflow ids or names of runs."""
    experiment: str | None = None
    """Experiment of the runs; without RUN: its newest 24 finished runs."""
    sweep: str | None = None
    """Compare the runs of this sweep."""
    group_by: str = "devices"
    """Order runs by devices, or by a param such as train.batch_size."""

    def run(self) -> int:
        """Print a comparison of runs, and the address of MLflow's own."""
        from dphybrid.tracking.compare import comparison_path, find_runs, read_runs, table_of
        from dphybrid.tracking.opening import store_to_read
        from dphybrid.tracking.tracker import ui_address

        settings = load_settings()
        experiment = settings.experiment if self.experiment is None else self.experiment
        if not self.runs and self.sweep is None and self.experiment is None:
            raise UserError("name runs to compare, or --experiment NAME, or --sweep ID (see --help)")
        if self.runs and self.sweep is not None:
            raise UserError(f"--sweep {self.sweep}: give a sweep or runs ({' '.join(self.runs)}), not both")
        uri = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
        runs = read_runs(uri, find_runs(uri, experiment, self.runs, self.sweep))
        print(table_of(runs, self.group_by))
        served = ui_address(uri)
        where = "" if served else ", while `dphybrid ui --port 5000` runs"
        print(f"\nCurves{where}: {served or 'http://127.0.0.1:5000'}/#{comparison_path(runs)}")
        return 0
