"""Finds and reads the runs to compare in MLflow, and logs the comparison page to MLflow."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from mlflow.entities import Metric, Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils import get_results_from_paginated_fn

from dphybrid.tracking.tracker import CHANGED_TAG, SWEEP_TAG, run_address, run_path
from dphybrid.tracking.writer import experiments_named, find_experiment
from dphybrid.util.errors import UserError

_MAX_RUNS = 256
"""With more runs the page is unreadable. A grid (`MAX_CELLS`) has at most as many."""
_NEWEST_RUNS = 24
"""How many runs of an experiment are compared if the user names none."""
_PAGE = 1000
_MAX_POINTS, _MAX_VALUE = 400, 1e308
"""The most points of a curve on the page; MLflow stores an infinite value as a number above `_MAX_VALUE`."""

_KIND_TAG, _REPLICAS_TAG = "dphybrid.kind", "dphybrid.replicas"
_COMPARISONS = "{} comparisons"
"""Name of the experiment for comparisons of another experiment's runs: they must not mix with trainings."""


@dataclass(frozen=True)
class RunFacts:
    """A run to compare. stages_ms: stage -> milliseconds of an average step. curves: metric -> points (step,
    seconds since the start, value). measured: number and digest of the validation rows; "" if unknown.
    members: the runs that this one summarizes, which differ only in their seed; spread: metric -> standard
    deviation over them."""

    run_id: str
    name: str
    status: str
    started: datetime
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    url: str = ""
    replicas: int = 1
    measured: str = ""
    members: Sequence["RunFacts"] = ()
    spread: Mapping[str, float] = field(default_factory=dict)

    def value(self, param: str) -> str:
        return self.params.get(param, "")


def read_runs(store_uri: str, run_ids: Sequence[str]) -> list[RunFacts]:
    """Return the recorded facts of runs, in the given order. Raises UserError for a run that cannot be read,
    and for fewer than two or too many runs."""
    client = MlflowClient(tracking_uri=store_uri)
    unique = list(dict.fromkeys(run_ids))
    if len(unique) < 2:
        there = f"there is one: {unique[0]}" if unique else "no run has finished"
        raise UserError(f"a comparison needs at least two runs, and {there}")
    if len(unique) > _MAX_RUNS:
        raise UserError(f"{len(unique)} runs do not fit on one page; name at most {_MAX_RUNS}")
    return [_read_run(client, store_uri, run_id) for run_id in unique]


def _read_run(client: MlflowClient, store_uri: str, run_id: str) -> RunFacts:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise UserError(f"run {run_id!r}: cannot be read ({str(error).splitlines()[0][:200]})") from error
    metrics, tags, begin = run.data.metrics, run.data.tags, run.info.start_time
    # At most six: more panels are hard to read, and each curve costs a call to the server.
    chosen = [name for name in metrics if name == "train/loss" or name.startswith("valid/")][:6]
    changed = {tag[len(CHANGED_TAG) :]: both for tag, both in tags.items() if tag.startswith(CHANGED_TAG)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            page = Path(client.download_artifacts(run_id, "report.json", folder))
            stages = json.loads(page.read_text(encoding="utf-8")).get("stages_ms", {})
        except (MlflowException, OSError, ValueError):
            stages = {}  # the run has no report, or not yet
    return RunFacts(
        run_id=run_id,
        name=run.info.run_name or run_id,
        status=run.info.status,
        started=datetime.fromtimestamp(begin / 1000),
        params=dict(run.data.params) | changed,
        metrics={
            name: math.copysign(math.inf, v) if abs(v) > _MAX_VALUE else v for name, v in metrics.items()
        },
        stages_ms=stages,
        curves={name: _curve(client.get_metric_history(run_id, name), begin) for name in chosen},
        url=run_address(store_uri, run.info.experiment_id, run_id),
        replicas=int(tags.get(_REPLICAS_TAG, "1")),
        measured=_measured(run),
    )


def _measured(run: Run) -> str:
    """Return number and digest of the validation rows of a run; "" if they are unknown."""
    params = run.data.params
    known = "valid.digest" in params
    return f"{int(params['valid.rows']):,} rows {params['valid.digest'][:8]}" if known else ""


def _curve(history: Sequence[Metric], begin_ms: int) -> list[tuple[float, float, float]]:
    """Return a curve's finite points, thinned out evenly; the last point is kept."""
    points = sorted((float(p.step), (p.timestamp - begin_ms) / 1000, p.value) for p in history)
    points = [point for point in points if abs(point[2]) < _MAX_VALUE]
    # Counted from the end, so that the last point is one of them.
    return points[::-1][:: -(-len(points) // _MAX_POINTS) or 1][::-1]


def find_runs(
    store_uri: str, experiment: str, wanted: Sequence[str] = (), sweep: str | None = None
) -> list[str]:
    """Return the ids of the runs in `wanted` (ids or names), in that order; otherwise of the finished runs of
    a sweep, or of the newest finished runs of the experiment, oldest first.

    Raises UserError for an experiment, run or sweep that does not exist, with the names of those that do.
    """
    client = MlflowClient(tracking_uri=store_uri)
    found = [each.experiment_id for each in experiments_named(client, experiment)]
    if not found:
        there = ", ".join(e.name for e in client.search_experiments(view_type=ViewType.ACTIVE_ONLY)) or "none"
        raise UserError(f"experiment {experiment!r}: does not exist at {store_uri}; it has: {there}")
    # Page by page: one call returns at most a thousand runs, and a wanted run may be older than those.
    every = get_results_from_paginated_fn(
        lambda count, token: client.search_runs(found, "", max_results=count, page_token=token),
        _PAGE,
    )
    runs = sorted(every, key=lambda run: run.info.start_time)
    runs = [run for run in runs if run.data.tags.get(_KIND_TAG) != "summary"]
    if wanted:
        ids = [run.info.run_id for run in runs]
        # Of several runs with one name the newest counts; an id wins over a name.
        by_name = {run.info.run_name: run.info.run_id for run in runs} | dict(zip(ids, ids, strict=True))
        unknown = [name for name in wanted if name not in by_name]
        if unknown:
            names = ", ".join(run.info.run_name for run in runs[-10:]) or "none"
            raise UserError(
                f"run {', '.join(unknown)}: not in experiment {experiment!r}; the newest there: {names}"
            )
        return [by_name[name] for name in wanted]
    if sweep is not None:
        known = {run.data.tags[SWEEP_TAG] for run in runs if SWEEP_TAG in run.data.tags}
        if sweep not in known:
            there = ", ".join(sorted(known)) or "none"
            raise UserError(f"--sweep {sweep}: not in experiment {experiment!r}; sweeps there: {there}")
        runs = [run for run in runs if run.data.tags.get(SWEEP_TAG) == sweep]
    newest = _MAX_RUNS if sweep is not None else _NEWEST_RUNS
    return [run.info.run_id for run in runs if run.info.status == "FINISHED"][-newest:]


def page_path(uri: str, experiment: str, run: str | None) -> str:
    """Return the part after `#` in the address of a run (name or id), or of all runs. Raises UserError if no
    run has that name."""
    client = MlflowClient(tracking_uri=uri)
    if run is None:
        found = experiments_named(client, experiment)
        there = f"/experiments/{found[0].experiment_id}/runs" if len(found) == 1 else "/experiments"
        return f"{there}?workflowType=machine_learning"
    (run_id,) = find_runs(uri, experiment, [run])
    there = client.get_run(run_id).info.experiment_id
    return run_path(there, run_id)


def log_comparison(
    store_uri: str, experiment: str, store: Path, page: Path, run_ids: Sequence[str], sweep: str | None
) -> tuple[str, str]:
    """Log a written comparison as a run in the experiment for comparisons (`_COMPARISONS`); return that run's
    id and address."""
    client = MlflowClient(tracking_uri=store_uri)
    experiment_id = find_experiment(client, store_uri, _COMPARISONS.format(experiment), store)
    name = f"comparison of {sweep}" if sweep else f"comparison of {len(run_ids)} runs"
    tags = {_KIND_TAG: "summary", "dphybrid.compared": ",".join(run_ids)}
    tags |= {SWEEP_TAG: sweep} if sweep else {}
    note = f"{name}: open `compare/{page.name}` under Artifacts."
    run = client.create_run(experiment_id, run_name=name, tags=tags | {"mlflow.note.content": note})
    client.log_artifacts(run.info.run_id, str(page.parent), "compare")
    client.set_terminated(run.info.run_id, "FINISHED")
    run_id = str(run.info.run_id)
    return run_id, run_address(store_uri, experiment_id, run_id)
