"""List runs, adopt one from elsewhere, or remove runs with everything that only they need.

examples:
  %(prog)s
  %(prog)s remove ctr-cpu-1121-044553 text-cpux2-1121-045901
  %(prog)s remove --older-than 30 --yes
  %(prog)s adopt ctr-cpu-1121-044553

adopt makes a run folder your own that you have copied into the data folder and that you trust. Without it,
runs from elsewhere are only read: they are not continued, sent or removed.

remove prints what it would remove, and removes it with --yes: the run's folder, its prepared data and frames,
and its run and models in MLflow, whose trash `mlflow gc` empties. It keeps runs that are running or queued,
runs whose record has not reached MLflow, and runs that a model alias points to.
"""

from typing import Literal

from pydantic import Field

from dphybrid.cli.parser import Command, Positional
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError
from dphybrid.util.text import aligned


class Flags(Command):
    """The flags of `runs`."""

    action: Positional[Literal["list", "remove", "adopt"]] = "list"
    """What to do with runs: list, remove or adopt."""
    names: Positional[list[str]] = Field(default=[], alias="RUN")
    """Names of runs."""
    older_than: float | None = Field(default=None, ge=0, le=36_500)
    """remove: all runs that began more than X days ago."""
    yes: bool = False
    """remove: carry it out; without this flag, only print what would be removed."""

    def run(self) -> int:
        """List, adopt or remove runs; return the exit code."""
        settings = load_settings()
        if self.action == "remove":
            return _remove(self.names, self.older_than, self.yes)
        if self.older_than is not None or self.yes:
            raise UserError("--older-than, --yes: only for `dphybrid runs remove`")
        from dphybrid.lifecycle.cleanup import row_of
        from dphybrid.run.folder import adopt, all_runs

        if self.action == "adopt":
            for run in [adopt(settings, name) for name in self.names]:
                print(f"{run.folder.name}: is your own now")
            return 0
        if self.names:
            raise UserError(f"runs list takes no names; `dphybrid ui {self.names[0]}` shows a run")
        rows = [row_of(run) for run in all_runs(settings)]
        table = aligned([[*rows[0]], *([*row.values()] for row in rows)] if rows else [])
        print("\n".join(table) or f"No runs in {settings.runs_dir}")
        return 0


def _remove(names: list[str], older_than: float | None, sure: bool) -> int:
    from dphybrid.lifecycle.cleanup import plan_removal, remove

    if not names and older_than is None:
        raise UserError("runs remove: name the runs, or give --older-than DAYS")
    settings = load_settings()
    removal = plan_removal(settings, names, older_than)
    for name, why in removal.kept.items():
        print(f"{name}: stays, {why}")
    if sure:
        for line in remove(removal, settings):
            print(line, flush=True)
        return 1 if any((settings.runs_dir / name).exists() for name in names) else 0
    for run in removal.runs:
        print(f"{run.folder.name}: would be removed")
    for path in removal.needless:
        print(f"{path}: would be removed, no run needs it")
    found = removal.runs or removal.needless
    print("Repeat the command with --yes to remove them" if found else "Nothing to remove")
    return 0
