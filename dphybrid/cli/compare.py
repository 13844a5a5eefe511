"""Compare up to six runs of the data folder: final metrics, and the values in which they differ.

example:
  %(prog)s text-cpu-1121-044553 text-cpux2-1121-045901

MLflow's own page compares curves, and any number of runs; the last line is its address.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from pydantic import Field

from dphybrid.cli.parser import Command, Positional
from dphybrid.config import flatten
from dphybrid.config.own_runs import is_own
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.text import aligned, flag_text, metric_text, printable

if TYPE_CHECKING:
    from dphybrid.run.folder import Run

_MOST, _WIDTH = 6, 80


class Flags(Command):
    """The flags of `compare`."""

    runs: Positional[list[str]] = Field(alias="RUN")
    """Names of runs."""

    def run(self) -> int:
        """Print the comparison, and the address of MLflow's own."""
        from dphybrid.run.folder import all_runs, find_run

        settings, chosen = load_settings(), list["Run"]()
        for name in dict.fromkeys(self.runs):
            if (run := find_run(settings, name)) is None:
                known = [run.folder.name for run in all_runs(settings)] or ["none yet"]
                raise UserError(f"{name}: there is no such run{suggestion(name, known)}")
            chosen.append(run)
        if not 2 <= len(chosen) <= _MOST:
            raise UserError(f"a comparison needs two to {_MOST} runs, and these are {len(chosen)}")
        print("\n\n".join(tables(chosen)))
        if where := curves(chosen):
            print(f"\n{where}")
        return 0


def tables(runs: "Sequence[Run]") -> list[str]:
    """Return final metrics and differing values of runs, each run in a column, as many side by side as 80
    characters hold."""
    from dphybrid.run.pages import MetricsPage

    rows: dict[str, list[str]] = {"run": [run.folder.name for run in runs]}
    pages = [run.folder / "metrics.json" for run in runs]
    ended = [MetricsPage.read(page) if page.is_file() else MetricsPage(metrics={}) for page in pages]
    measured = [page.metrics | {f"test {name}": value for name, value in page.test.items()} for page in ended]
    for name in dict.fromkeys(name for metrics in measured for name in metrics):
        rows[name] = [metric_text(metrics[name]) if name in metrics else "-" for metrics in measured]
    configs = [flatten(run.page.config) | {"devices": run.page.devices} for run in runs]
    for name in dict.fromkeys(name for config in configs for name in config):
        texts = [flag_text(config.get(name)) or "-" for config in configs]
        if len(set(texts)) > 1:
            rows[name] = texts
    title = max(map(len, rows))
    columns = [[printable(row[n])[: _WIDTH - title - 2] for row in rows.values()] for n in range(len(runs))]
    blocks, used = [[list(rows)]], title
    for column in columns:
        width = 2 + max(map(len, column))
        if used + width > _WIDTH and len(blocks[-1]) > 1:
            blocks, used = [*blocks, [list(rows)]], title
        blocks[-1].append(column)
        used += width
    return ["\n".join(aligned([*zip(*block, strict=True)])) for block in blocks]


def curves(runs: "Sequence[Run]") -> str:
    """Return where MLflow compares the curves; "" unless one MLflow has all of these runs, which are the data
    folder's own: a page from elsewhere may name any server."""
    from dphybrid.tracking.record import destination
    from dphybrid.tracking.tracker import page_address

    there = [destination(run.folder) if is_own(run.folder, run.settings) else {} for run in runs]
    noted = {each.get("tracking_uri", "") for each in there}
    if len(noted) > 1 or not all(noted):
        return ""
    ids, experiments = [each["run_id"] for each in there], sorted({each["experiment_id"] for each in there})
    page = f"/compare-runs?runs={quote(json.dumps(ids))}&experiments={quote(json.dumps(experiments))}"
    if served := page_address(noted.pop(), page):
        return f"Curves: {served}"
    return f"Curves, while `dphybrid ui --port 5000` runs: http://127.0.0.1:5000/#{page}"
