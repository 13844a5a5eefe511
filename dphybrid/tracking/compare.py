"""The runs that are compared, as MLflow has them; and the page that compares them, put into MLflow."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils import get_results_from_paginated_fn

from dphybrid.tracking.base import CHANGED_TAG, SWEEP_TAG
from dphybrid.tracking.tracker import find_experiment, run_address
from dphybrid.tracking.writer import RESULT, run_path, view_path
from dphybrid.util.errors import UserError

_MAX_RUNS = 256
"""More runs than this make no readable page; a sweep has no more cells."""
_NEWEST_RUNS = 24
"""How many runs of an experiment are compared where none are named."""

_PAGE = 1000
_MAX_POINTS, _MAX_VALUE = 600, 1e308
"""Points of a curve that the page keeps; what MLflow makes of an infinite value is larger than the other."""

_KIND_TAG, _REPLICAS_TAG = "dphybrid.kind", "dphybrid.replicas"
_COMPARISONS = "{} comparisons"
"""Name of the experiment that holds the comparisons of another one's runs, so that they do not stand among
the trainings."""


@dataclass(frozen=True)
class RunFacts:
    """What a comparison needs of one run, or of several that differ in their seed alone.

    curves: metric -> points (step, seconds since the start, value). stages_ms: stage -> milliseconds of an
    average step. spread: metric -> standard deviation over the seeds.
    """

    run_id: str
    name: str
    status: str
    started: datetime
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    splits: Mapping[tuple[int, str], str]
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    url: str = ""
    replicas: int = 1
    spread: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float | None:
        return self.metrics.get("summary/samples_per_s_median")

    def value(self, param: str) -> str:
        return self.params.get(param, "not set")


def read_runs(store_uri: str, run_ids: Sequence[str]) -> list[RunFacts]:
    """Return what is on record of runs, in the order given. Raises UserError."""
    client = MlflowClient(tracking_uri=store_uri)
    unique = list(dict.fromkeys(run_ids))
    if len(unique) < 2:
        there = f"there is one: {unique[0]}" if unique else "there are none that have finished"
        raise UserError(f"a comparison needs at least two runs, and {there}")
    if len(unique) > _MAX_RUNS:
        raise UserError(f"{len(unique)} runs make no readable page; name at most {_MAX_RUNS}")
    return [_read_run(client, store_uri, run_id) for run_id in unique]


def _read_run(client: MlflowClient, store_uri: str, run_id: str) -> RunFacts:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise UserError(f"run {run_id!r}: cannot be read ({str(error).splitlines()[0][:200]})") from error
    metrics = dict(run.data.metrics)
    # More than six panels are no page to read, and each curve is a call to the server.
    chosen = [name for name in metrics if name == "train/loss" or name.startswith("valid/")][:6]
    begin, tags = run.info.start_time, run.data.tags.items()
    changed = {tag[len(CHANGED_TAG) :]: both for tag, both in tags if tag.startswith(CHANGED_TAG)}
    stages = (_read_page(client, run_id, "report.json") or {}).get("stages_ms", {})
    return RunFacts(
        run_id=run_id,
        name=run.info.run_name or run_id,
        status=run.info.status,
        started=datetime.fromtimestamp(begin / 1000),
        params=dict(run.data.params) | changed,
        replicas=int(run.data.tags.get(_REPLICAS_TAG, "1")),
        metrics=metrics,
        splits=_full_split(_read_page(client, run_id, "split_shapes.json") or {}),
        stages_ms=dict(sorted(stages.items(), key=lambda stage: -stage[1])),
        url=run_address(store_uri, run.info.experiment_id, run_id),
        curves={name: _curve(client.get_metric_history(run_id, name), begin) for name in chosen},
    )


def _curve(history: Sequence[Metric], begin_ms: int) -> list[tuple[float, float, float]]:
    """Return a curve's finite points, so many of them at even distances as a screen shows, the last one among
    them."""
    points = sorted((float(p.step), (p.timestamp - begin_ms) / 1000, p.value) for p in history)
    points = [point for point in points if abs(point[2]) < _MAX_VALUE]
    stride = -(-len(points) // _MAX_POINTS) or 1
    return points[::-1][::stride][::-1]


def _full_split(table: Mapping[str, Any]) -> dict[tuple[int, str], str]:
    """Return the shapes of the first split by replica and block, from a run's table of splits."""
    rows = [dict(zip(table["columns"], values, strict=True)) for values in table.get("data", [])]
    # Splits are numbered by their first steps, and a training begins with a full batch.
    return {(row["replica"], row["block"]): row["split"] for row in rows if row["number"] == 1}


def _read_page(client: MlflowClient, run_id: str, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return json.loads(
                Path(client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8")
            )
        except (MlflowException, OSError, ValueError):
            return None  # the run has none, or has not got so far


def find_runs(
    store_uri: str, experiment: str, wanted: Sequence[str] = (), sweep: str | None = None
) -> list[str]:
    """Return the ids of runs: those wanted (ids or names), the finished ones of a sweep, or else the newest
    finished ones of the experiment; oldest first.

    Raises UserError for a name that is not there, with those that are.
    """
    client = MlflowClient(tracking_uri=store_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        there = ", ".join(e.name for e in client.search_experiments(view_type=ViewType.ACTIVE_ONLY)) or "none"
        raise UserError(f"experiment {experiment!r}: is not at {store_uri}; there: {there}")
    # Page by page: MLflow gives a thousand at most, and the run that is wanted may be an older one.
    every = get_results_from_paginated_fn(
        lambda count, token: client.search_runs(
            [found.experiment_id], "", max_results=count, page_token=token
        ),
        _PAGE,
    )
    runs = sorted(every, key=lambda run: run.info.start_time)
    runs = [run for run in runs if run.data.tags.get(_KIND_TAG) != "summary"]
    if wanted:
        ids = [run.info.run_id for run in runs]
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
    """Return what follows `#` in the address of a run (name or id), or of all runs. Raises UserError when
    there is none of that name."""
    client = MlflowClient(tracking_uri=uri)
    if run is None:
        found = client.get_experiment_by_name(experiment)
        return view_path(str(found.experiment_id), RESULT) if found else "/experiments"
    (run_id,) = find_runs(uri, experiment, [run])
    there = client.get_run(run_id).info.experiment_id
    return run_path(there, run_id)


def log_comparison(
    store_uri: str, experiment: str, store: Path, page: Path, run_ids: Sequence[str], sweep: str | None
) -> tuple[str, str]:
    """Put a written comparison into a run of its own, in the experiment beside that of the runs compared;
    return that run's id and where its page is."""
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
