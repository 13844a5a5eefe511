"""Runs side by side: finds and reads them, and writes the page that compares them; the page can go into
MLflow, too. It is one file with its numbers, its script and plotly in it: no server, no network."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.base import CHANGED_TAG
from dphybrid.tracking.compare_facts import (
    DEVICES,
    SEED,
    Point,
    RunFacts,
    differing,
    finals,
    ordered,
    param_of,
    speeds,
    split_table,
)
from dphybrid.tracking.figures import COLOURS, overlay_figure, side_by_side_figure
from dphybrid.tracking.report import rendered
from dphybrid.tracking.tracker import find_experiment, run_address
from dphybrid.tracking.views import RESULT, run_path, view_path
from dphybrid.util.errors import UserError

MAX_RUNS = 256
"""More runs than this make no readable page; a sweep has no more cells."""
_PICTURED_RUNS = 24
"""More runs than this make no readable picture, which nobody can sort or filter."""

_MAX_POINTS = 600
"""Points of a curve that the page keeps: more than a screen shows."""

SWEEP_TAG, _KIND_TAG, _REPLICAS_TAG = "dphybrid.sweep", "dphybrid.kind", "dphybrid.replicas"
_COMPARISONS = "{} comparisons"
"""Name of the experiment that holds the comparisons of another one's runs, so that they do not stand among
the trainings."""


def write_comparison(runs: Sequence[RunFacts], folder: Path, group_by: str) -> Path:
    """Write the comparison of runs into `folder` (`index.html` and a PNG for each figure); return the page.
    Raises UserError for a param that no run has."""
    from plotly.offline import get_plotlyjs

    param = param_of(group_by, runs)
    runs = ordered(runs, param)
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in _pictures(runs, param).items():
        (folder / name).write_bytes(picture)
    page, (replicas, splits) = folder / "index.html", split_table(runs)
    data = json.dumps(_finite(page_data(runs, param)), allow_nan=False)
    text = rendered(
        "page.html",
        title=f"{len(runs)} runs by {param}",
        made=datetime.now().strftime("%Y-%m-%d %H:%M"),
        replicas=replicas,
        splits=splits,
        # JSON that does not end the page's script
        data=data.replace("<", "\\u003c").replace("\u2028", "\\u2028"),
        script=Path(__file__).with_name("page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )
    page.write_text(text, encoding="utf-8")
    return page


def _pictures(runs: Sequence[RunFacts], param: str) -> dict[str, bytes]:
    """Return the still pictures of a comparison by file name, for where no page can be opened."""
    pictures = {}
    speed = speeds(runs, param)
    series: dict[str, list[tuple[float | str, float]]] = {}
    for run in runs:
        if run.run_id in speed:
            place = float(run.replicas) if param == DEVICES else run.value(param)
            own = speed[run.run_id]
            series.setdefault(own.among or "measured", []).append((place, own.ratio))
    if any(len({place for place, _ in points}) > 1 for points in series.values()):
        counts = sorted({run.replicas for run in runs if run.run_id in speed}) if param == DEVICES else []
        ideal = [(float(count), count / counts[0]) for count in counts]
        label = "devices" if counts else param
        pictures["speed.png"] = overlay_figure({"speed-up": series}, label, ideal)
    if len(runs) > _PICTURED_RUNS:
        return pictures
    if stages := {run.name: run.stages_ms for run in runs if run.stages_ms}:
        pictures["stages.png"] = side_by_side_figure(stages)
    keys = sorted({key for run in runs for key in run.steps}, reverse=True)
    if curves := {key: {run.name: run.steps[key] for run in runs if key in run.steps} for key in keys}:
        pictures["metrics.png"] = overlay_figure(curves, "step")
    return pictures


def page_data(runs: Sequence[RunFacts], param: str) -> dict[str, object]:
    """Return what the page's script draws, as values fit for JSON."""
    names = differing(runs)
    by = list(
        dict.fromkeys([param, *names] + ([DEVICES] if any(DEVICES in run.params for run in runs) else []))
    )
    return {
        "param": param,
        "colours": COLOURS,
        "params": by,
        "differing": names,
        "finals": finals(runs),
        "seed": SEED,
        "devices": DEVICES,
        "virtual": any("*" in run.value(DEVICES) for run in runs),
        "orders": {name: [run.run_id for run in ordered(runs, name)] for name in by},
        "speeds": {
            name: {run_id: asdict(speed) for run_id, speed in speeds(runs, name).items()} for name in by
        },
        "runs": [_run(run, [*by, *names]) for run in runs],
    }


def _run(run: RunFacts, names: Sequence[str]) -> dict[str, object]:
    return {
        "id": run.run_id,
        "name": run.name,
        "url": run.url,
        "status": run.status.lower(),
        "started": run.started.strftime("%Y-%m-%d %H:%M:%S"),
        "replicas": run.replicas,
        "params": {name: run.value(name) for name in names},
        "metrics": {
            name: value for name, value in run.metrics.items() if name.startswith(("final/", "summary/"))
        },
        "stages": dict(run.stages_ms),
        "steps": {name: _thinned(points) for name, points in run.steps.items()},
        "times": {name: _thinned(points) for name, points in run.times.items()},
    }


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return points at even distances, the last one among them."""
    stride = -(-len(points) // _MAX_POINTS) or 1
    return [point for place, point in enumerate(points) if (len(points) - 1 - place) % stride == 0]


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not -1e308 < value < 1e308 else value


def read_runs(store_uri: str, run_ids: Sequence[str]) -> list[RunFacts]:
    """Return what is on record of runs, in the order given. Raises UserError."""
    client = MlflowClient(tracking_uri=store_uri)
    unique = list(dict.fromkeys(run_ids))
    if len(unique) < 2:
        there = f"there is one: {unique[0]}" if unique else "there are none that have finished"
        raise UserError(f"a comparison needs at least two runs, and {there}")
    if len(unique) > MAX_RUNS:
        raise UserError(f"{len(unique)} runs make no readable page; name at most {MAX_RUNS}")
    return [_read_run(client, store_uri, run_id) for run_id in unique]


def _read_run(client: MlflowClient, store_uri: str, run_id: str) -> RunFacts:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise UserError(f"run {run_id!r}: cannot be read ({str(error).splitlines()[0][:200]})") from error
    metrics = dict(run.data.metrics)
    chosen = [name for name in metrics if name == "train/loss" or name.startswith("valid/")][:6]
    histories = {name: client.get_metric_history(run_id, name) for name in chosen}
    begin, tags = run.info.start_time, run.data.tags.items()
    changed = {tag[len(CHANGED_TAG) :]: both for tag, both in tags if tag.startswith(CHANGED_TAG)}
    return RunFacts(
        run_id=run_id,
        name=run.info.run_name or run_id,
        status=run.info.status,
        started=datetime.fromtimestamp(begin / 1000),
        params=dict(run.data.params) | changed,
        replicas=int(run.data.tags.get(_REPLICAS_TAG, "1")),
        metrics=metrics,
        splits=_full_split(_read_page(client, run_id, "split_shapes.json") or {}),
        stages_ms=_stages_ms(client, run_id, metrics),
        url=run_address(store_uri, run.info.experiment_id, run_id),
        steps={name: sorted((float(p.step), p.value) for p in points) for name, points in histories.items()},
        times={
            name: sorted(((p.timestamp - begin) / 1000, p.value) for p in points)
            for name, points in histories.items()
        },
    )


def _full_split(table: Mapping[str, Any]) -> dict[tuple[int, str], str]:
    """Return the shapes of the first split by replica and block, from a run's table of splits."""
    rows = [dict(zip(table["columns"], values, strict=True)) for values in table.get("data", [])]
    return {(row["replica"], row["block"]): row["split"] for row in rows if row["number"] == 1}


def _read_page(client: MlflowClient, run_id: str, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return json.loads(
                Path(client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8")
            )
        except (MlflowException, OSError, ValueError):
            return None  # the run has none, or has not got so far


def _stages_ms(client: MlflowClient, run_id: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds of an average step by stage, largest first: from the metrics, or else from the
    run's report."""
    prefix = "timing_mean/"
    found = {
        name.removeprefix(prefix).removesuffix("_ms"): value
        for name, value in metrics.items()
        if name.startswith(prefix)
    }
    found = found or (_read_page(client, run_id, "report.json") or {}).get("stages_ms", {})
    return dict(sorted(found.items(), key=lambda item: -item[1]))


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
    runs = sorted(client.search_runs([found.experiment_id]), key=lambda run: run.info.start_time)
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
    newest = MAX_RUNS if sweep is not None else _PICTURED_RUNS
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
