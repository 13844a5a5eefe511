"""Compare up to six runs: final metrics, and the values in which they differ.

example:
  %(prog)s text-cpu-1121-044553 text-cpux2-1121-045901

MLflow's own page compares curves, and any number of runs; the last line is its address.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from dphybrid.cli.parser import Command, Positional
from dphybrid.config import flatten
from dphybrid.config.own_runs import is_own
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.text import flag_text, metric_text, printable

if TYPE_CHECKING:
    from dphybrid.run.folder import Run


class Flags(Command):
    """The flags of `compare`."""

    runs: Positional[list[str]] = Field(alias="RUN", min_length=2, max_length=6)
    """Names of runs."""

    def run(self) -> int:
        """Print the comparison, and the address of MLflow's own."""
        from rich.console import Console
        from rich.table import Table

        from dphybrid.run.folder import all_runs
        from dphybrid.tracking.record import destination
        from dphybrid.tracking.tracker import comparison

        known = {run.folder.name: run for run in all_runs(load_settings())}
        if absent := [name for name in self.runs if name not in known]:
            raise UserError(f"{absent[0]}: there is no such run{suggestion(absent[0], [*known])}")
        runs = [known[name] for name in self.runs]
        table = Table("", *self.runs, box=None)
        for name, texts in _rows(runs).items():
            table.add_row(name, *(printable(text) for text in texts))
        Console(width=80, highlight=False, markup=False).print(table)
        # A page from elsewhere may name any server.
        own = [run for run in runs if is_own(run.folder, run.settings)]
        if own == runs and (curves := comparison([destination(run.folder) for run in own])):
            print(f"Curves: {curves}")
        return 0


def _rows(runs: "list[Run]") -> dict[str, list[str]]:
    """Return the final metrics of runs, and the values in which they differ, by name."""
    from dphybrid.run.pages import MetricsPage

    pages = [run.folder / "metrics.json" for run in runs]
    ended = [MetricsPage.read(page) if page.is_file() else MetricsPage(metrics={}) for page in pages]
    measured = [page.metrics | {f"test {name}": value for name, value in page.test.items()} for page in ended]
    rows = {
        name: [metric_text(metrics[name]) if name in metrics else "-" for metrics in measured]
        for name in dict.fromkeys(name for metrics in measured for name in metrics)
    }
    configs = [flatten(run.page.config) | {"devices": run.page.devices} for run in runs]
    for name in dict.fromkeys(name for config in configs for name in config):
        texts = [flag_text(config.get(name)) or "-" for config in configs]
        if len({*texts}) > 1:
            rows[name] = texts
    return rows
