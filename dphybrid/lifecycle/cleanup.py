"""List runs, and remove them: a run's folder, its record, and its run and models in MLflow. Prepared data and
frames go by age.

Runs stay while they are running, while records of them wait, and if a registered model's alias points to
them.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from dphybrid.config.own_runs import check_own, is_own
from dphybrid.config.settings import Settings
from dphybrid.run.folder import Run, all_runs
from dphybrid.run.pages import Report
from dphybrid.tracking.opening import noted_store
from dphybrid.tracking.record import addresses, waits
from dphybrid.util.alive import alive, holding
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.files import given_path, remove_folder
from dphybrid.util.text import metric_text

_FRESH_S = 3600.0
"""Prepared data and frames stay for at least this long after their last use, and as long as a run may wait
for GPUs: a run that begins may have chosen them, and has no page yet."""


@dataclass(frozen=True)
class Removal:
    """What to remove: runs, and old prepared data and frames. kept: name of a run -> why it stays."""

    runs: Sequence[Run]
    needless: Sequence[Path]
    kept: Mapping[str, str]


def row_of(run: Run) -> dict[str, str]:
    """Return what a list of runs shows of a run; of one whose files cannot be read, the reason."""
    try:
        page = run.folder / "report.json"
        metrics = Report.read(page).metrics if page.is_file() else {}
        metric = next((f"{name} {metric_text(value)}" for name, value in metrics.items()), "")
        status = run.status
    except (UserError, OSError) as error:
        print(f"Note: {run.folder.name}: {error}", file=sys.stderr, flush=True)
        metric, status = "", "unreadable"
    return {
        "run": run.folder.name,
        "recipe": run.page.recipe,
        "status": status,
        "created": run.page.created[:10],
        "metric": metric,
        "registered": run.page.register_as,
    }


def plan_removal(
    settings: Settings,
    names: Collection[str] = (),
    older_than_days: float | None = None,
) -> Removal:
    """Find what to remove: the named runs, or all that were created more than `older_than_days` days ago,
    with prepared data and frames that nothing has used since and no run that stays names.

    A run stays if MLflow, which knows the champions, cannot be asked about it where its record says that it
    is. Raises UserError for a name that no run of this data folder has.
    """
    runs = {run.folder.name: run for run in all_runs(settings)}
    for name in names:
        if name in runs:
            check_own(runs[name].folder, settings, "remove its folder yourself")
        elif (folder := settings.runs_dir / name).is_dir():
            raise UserError(
                f"{name}: its run.json cannot be read, so its data and MLflow run are unknown; delete "
                f"{folder} yourself"
            )
        else:
            raise UserError(f"{name}: there is no such run{suggestion(name, list(runs) or ['none yet'])}")
    chosen = set(names)
    if older_than_days is not None:
        limit = (datetime.now(UTC) - timedelta(days=older_than_days)).isoformat()
        old = (name for name, run in runs.items() if run.page.created < limit)
        chosen |= {name for name in old if is_own(runs[name].folder, settings)}
    kept, in_use = dict[str, str](), cache(_runs_in_use)
    for name in filter(chosen.__contains__, runs):
        try:
            why = _reason_to_keep(runs[name], settings, in_use)
        except UserError as error:
            why = f"it is not known whether its model is in use: {error}"
        if why:
            kept[name] = why
    removed = chosen - kept.keys()
    needless = set[Path]()
    if older_than_days is not None:
        age_s = max(older_than_days * 86400, _FRESH_S + settings.gpu_wait_s)
        unused = {path for path in _own_paths(settings) if time.time() - path.stat().st_mtime > age_s}
        needless = unused - _used_by(run for name, run in runs.items() if name not in removed)
    return Removal([run for name, run in runs.items() if name in removed], sorted(needless), kept)


def remove(removal: Removal, settings: Settings) -> Iterator[str]:
    """Remove what `plan_removal` has found; yield a line about each run. A run that has begun again meanwhile
    stays, with all that it needs."""
    for run in removal.runs:
        try:
            with holding(run.folder):
                if uri := _recorded_in(run, settings):
                    from dphybrid.tracking.models import forget_run

                    for run_id in {there["run_id"] for there in addresses(run.folder)}:
                        forget_run(uri, run_id)
                remove_folder(run.folder)
        except UserError as error:  # one run must not hold up the others
            yield f"{run.folder.name}: stays, {error}" if run.folder.exists() else f"{error}"
            continue
        yield f"{run.folder.name}: removed"
    needed = _used_by(all_runs(settings)) if removal.needless else set()
    for path in removal.needless:
        with suppress(FileNotFoundError):  # another command has removed it meanwhile
            if path not in needed and time.time() - path.stat().st_mtime > _FRESH_S:
                remove_folder(path) if path.is_dir() else path.unlink()
                yield f"{path}: removed"


def _reason_to_keep(run: Run, settings: Settings, in_use: Callable[[str], Mapping[str, str]]) -> str:
    if alive(run.folder):
        return "it is running"
    if (uri := _recorded_in(run, settings)) is None:
        return ""
    for there in addresses(run.folder):
        if why := in_use(uri).get(there["run_id"]):
            return why
    why = "its record is not in MLflow yet; `dphybrid sync` copies it"
    return why if waits(run.folder) else ""


def _recorded_in(run: Run, settings: Settings) -> str | None:
    """Return where MLflow has a run, None if nowhere. Raises UserError if that cannot be asked."""
    return noted_store(run.folder, settings.mlflow_uri, settings.mlflow_dir) if run.page.run_id else None


def _runs_in_use(uri: str) -> Mapping[str, str]:
    from dphybrid.tracking.models import runs_in_use

    return runs_in_use(uri)


def _used_by(runs: Iterable[Run]) -> set[Path]:
    """Return the paths of prepared data and of files that runs name."""
    found = set[Path]()
    for run in runs:
        data = run.page.section("data")
        named = [run.page.prepared, *(data.get(name) for name in ("path", "valid_path", "test_path", "base"))]
        found |= {given_path(str(path), run.folder.name) for path in named if path}
    return found


def _own_paths(settings: Settings) -> set[Path]:
    """Return the prepared data and frames of the data folder: what dphybrid made itself, never the user's
    files."""
    folders = (settings.prepared_dir, settings.frames_dir)
    found = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    return {path for path in found if not path.name.startswith(".")}
