"""Runs side by side: speed against devices, where each one's step goes, metric curves, and only what differs in their configs."""

import difflib
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.compare_page import Section, write_page
from dphybrid.tracking.figures import overlay_figure, scaling_figure, side_by_side_figure
from dphybrid.tracking.mlflow_tracker import find_experiment
from dphybrid.util.errors import UserError

MAX_RUNS = 24
"""More runs than this make no readable page."""

GROUPS = {"devices": "devices.resolved", "batch": "train.batch_size", "recipe": "recipe"}
"""Short names for what runs are often grouped by; any other name is a param's."""

SWEEP_TAG, KIND_TAG = "dphybrid.jobs.sweep", "dphybrid.kind"
_NOT_CONFIG = ("size.", "devices.replicas")

Point = tuple[float, float]


@dataclass(frozen=True)
class RunFacts:
    """What a comparison needs of one run. steps, times: curve name -> points (step or seconds since the start, value)."""

    run_id: str
    name: str
    status: str
    started: datetime
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    splits: Sequence[tuple[str, str]]
    steps: Mapping[str, list[Point]] = field(default_factory=dict)
    times: Mapping[str, list[Point]] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        return int(self.params.get("devices.replicas", "1"))

    @property
    def samples_per_s(self) -> float | None:
        return self.metrics.get("summary/samples_per_s_median")

    @cached_property
    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of an average step by stage, without what happens between steps."""
        found = {
            name.removeprefix("timing_mean/").removesuffix("_ms"): value
            for name, value in self.metrics.items()
            if name.startswith("timing_mean/")
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def group(self, group_by: str) -> str:
        return self.params.get(GROUPS.get(group_by, group_by), "not set")


@dataclass(frozen=True)
class Group:
    """Runs with the same value of what they are grouped by."""

    value: str
    runs: list[RunFacts]

    @property
    def samples_per_s(self) -> float | None:
        known = [run.samples_per_s for run in self.runs if run.samples_per_s is not None]
        return statistics.median(known) if known else None


def compare_runs(store_uri: str, run_ids: Sequence[str], folder: Path, group_by: str | None = "devices") -> Path:
    """Write the comparison of runs into `folder` (`index.html` and a PNG for each figure); return the page.

    run_ids: MLflow ids. group_by: devices, or the name of a param. Raises UserError for unknown runs and for fewer than two of them.
    """
    runs = read_runs(store_uri, run_ids)
    return write_comparison(runs, folder, group_by or "devices")


def write_comparison(runs: Sequence[RunFacts], folder: Path, group_by: str) -> Path:
    """Write the page and pictures of runs that were read. Raises UserError for a param that no run has."""
    name = GROUPS.get(group_by, group_by)
    if not any(name in run.params for run in runs):
        params = sorted({param for run in runs for param in run.params} | set(GROUPS))
        near = difflib.get_close_matches(group_by, params, 3) or list(GROUPS)
        raise UserError(f"--group-by {group_by}: no run has such a param; near: {', '.join(near)}")
    groups = group_runs(runs, group_by)
    sections = [Section("Runs", table=overview(groups, group_by))]
    speeds = {group.value: group.samples_per_s for group in groups}
    known = {value: speed for value, speed in speeds.items() if speed is not None}
    if len(known) > 1:
        by_devices = GROUPS.get(group_by, group_by) == "devices.resolved"
        places = [float(group.runs[0].replicas) for group in groups if group.value in known] if by_devices else None
        virtual = any("*" in value for value in known) and by_devices
        note = (
            "Virtual devices share their hardware: they show what splitting costs, not what more GPUs bring." if virtual else ""
        )
        sections.append(Section("Speed", note, "speed.png", scaling_figure(known, places, group_by)))
    named = {run_label(run, group_by): run.stages_ms for run in runs if run.stages_ms}
    if named:
        figure = side_by_side_figure(named)
        sections.append(Section("Where a step's time goes", "Mean milliseconds of a step, by stage.", "stages.png", figure))
    for title, attribute, axis in (("step", "steps", "step"), ("time", "times", "seconds since the start")):
        curves = {
            key: {run_label(run, group_by): getattr(run, attribute)[key] for run in runs if key in getattr(run, attribute)}
            for key in sorted({key for run in runs for key in getattr(run, attribute)}, reverse=True)
        }
        if curves:
            picture = overlay_figure(curves, axis)
            sections.append(Section(f"Metrics against {title}", "", f"metrics_against_{title}.png", picture))
    sections.append(Section("How a full batch was split", table=split_table(runs, group_by)))
    sections.append(Section("What differs in the configs", table=differences(runs, group_by)))
    return write_page(folder, f"{len(runs)} runs by {group_by}", sections)


def read_runs(store_uri: str, run_ids: Sequence[str]) -> list[RunFacts]:
    """Return what is on record of runs, in the order given. Raises UserError."""
    client = MlflowClient(tracking_uri=store_uri)
    unique = list(dict.fromkeys(run_ids))
    if len(unique) < 2:
        there = f"there is one: {unique[0]}" if unique else "there are none that have finished"
        raise UserError(f"a comparison needs at least two runs, and {there}")
    if len(unique) > MAX_RUNS:
        raise UserError(f"{len(unique)} runs make no readable page; name at most {MAX_RUNS}")
    return [_read_run(client, run_id) for run_id in unique]


def _read_run(client: MlflowClient, run_id: str) -> RunFacts:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise UserError(f"run {run_id!r}: cannot be read ({str(error).splitlines()[0][:200]})") from error
    metrics = dict(run.data.metrics)
    chosen = [name for name in metrics if name == "train/loss" or name.startswith("valid/")][:6]
    histories = {name: client.get_metric_history(run_id, name) for name in chosen}
    begin = run.info.start_time
    return RunFacts(
        run_id=run_id,
        name=run.info.run_name or run_id,
        status=run.info.status,
        started=datetime.fromtimestamp(begin / 1000),
        params=dict(run.data.params),
        metrics=metrics,
        splits=_read_splits(client, run_id),
        steps={name: sorted((float(p.step), p.value) for p in points) for name, points in histories.items()},
        times={name: sorted(((p.timestamp - begin) / 1000, p.value) for p in points) for name, points in histories.items()},
    )


def _read_splits(client: MlflowClient, run_id: str) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = client.download_artifacts(run_id, "split_shapes.json", folder)
            table = json.loads(Path(path).read_text(encoding="utf-8"))
        except (MlflowException, OSError, ValueError):
            return []  # the run has none, or has not got so far
    return [(str(row[0]), str(row[1])) for row in table["data"]]


def find_runs(store_uri: str, experiment: str, wanted: Sequence[str] = (), sweep: str | None = None) -> list[str]:
    """Return the ids of runs: those wanted (ids or names), those of a sweep, or else all finished ones of the experiment, oldest first.

    Raises UserError for a name that is not there, with those that are.
    """
    client = MlflowClient(tracking_uri=store_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        there = ", ".join(e.name for e in client.search_experiments(view_type=ViewType.ACTIVE_ONLY)) or "none"
        raise UserError(f"experiment {experiment!r}: is not at {store_uri}; there: {there}")
    runs = [
        run for run in client.search_runs([found.experiment_id], max_results=1000) if run.data.tags.get(KIND_TAG) != "summary"
    ]
    runs.sort(key=lambda run: run.info.start_time)
    if wanted:
        by_name = {run.info.run_name: run.info.run_id for run in runs} | {run.info.run_id: run.info.run_id for run in runs}
        unknown = [name for name in wanted if name not in by_name]
        if unknown:
            names = ", ".join(run.info.run_name for run in runs[-10:]) or "none"
            raise UserError(f"run {', '.join(unknown)}: not in experiment {experiment!r}; the newest there: {names}")
        return [by_name[name] for name in wanted]
    if sweep is not None:
        runs = [run for run in runs if run.data.tags.get(SWEEP_TAG) == sweep]
    return [run.info.run_id for run in runs if run.info.status == "FINISHED"][-MAX_RUNS:]


def log_comparison(store_uri: str, experiment: str, store: Path, page: Path, run_ids: Sequence[str], sweep: str | None) -> str:
    """Put a written comparison into a run of its own, beside those compared; return that run's id.

    It is no parent of them: MLflow's pages would hide the charts of nested runs.
    """
    client = MlflowClient(tracking_uri=store_uri)
    experiment_id = find_experiment(client, store_uri, experiment, store)
    name = f"comparison of {sweep}" if sweep else f"comparison of {len(run_ids)} runs"
    tags = {KIND_TAG: "summary", "dphybrid.compared": ",".join(run_ids)}
    tags |= {SWEEP_TAG: sweep} if sweep else {}
    note = f"{name}: open `compare/{page.name}` under Artifacts."
    run = client.create_run(experiment_id, run_name=name, tags=tags | {"mlflow.note.content": note})
    client.log_artifacts(run.info.run_id, str(page.parent), "compare")
    client.set_terminated(run.info.run_id, "FINISHED")
    return str(run.info.run_id)


def group_runs(runs: Sequence[RunFacts], group_by: str) -> list[Group]:
    """Return runs by value, fewest devices first, then by number, then by text."""
    groups: dict[str, list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(run.group(group_by), []).append(run)

    def order(item: tuple[str, list[RunFacts]]) -> tuple[int, float, str]:
        devices = item[1][0].replicas if GROUPS.get(group_by, group_by) == "devices.resolved" else 0
        return (devices, as_number(item[0]) or 0.0, item[0])

    return [Group(value, members) for value, members in sorted(groups.items(), key=order)]


def as_number(text: str) -> float | None:
    """Return a text as a number, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def run_label(run: RunFacts, group_by: str) -> str:
    """Return a short name that says where a run belongs."""
    return f"{run.group(group_by)} ({run.name})"


def overview(groups: Sequence[Group], group_by: str) -> list[dict[str, str]]:
    """Return a row a run: speed, speed-up against the first group, efficiency a device, and what it came to."""
    base = groups[0]
    finals = sorted({name for group in groups for run in group.runs for name in run.metrics if name.startswith("final/")})
    rows = []
    for group in groups:
        for run in group.runs:
            speed, ratio = run.samples_per_s, None
            if speed is not None and base.samples_per_s:
                ratio = speed / base.samples_per_s
            fair = ratio * base.runs[0].replicas / run.replicas if ratio is not None else None
            rows.append(
                {group_by: group.value, "run": run.name, "status": run.status.lower()}
                | {name.removeprefix("final/"): number(run.metrics.get(name)) for name in finals}
                | {
                    "samples/s": number(speed),
                    "speed-up": number(ratio),
                    "efficiency": "" if fair is None else f"{fair:.0%}",
                    "step p50, ms": number(run.metrics.get("summary/step_ms_p50")),
                    "step p95, ms": number(run.metrics.get("summary/step_ms_p95")),
                    "training, s": number(run.metrics.get("summary/train_s")),
                }
            )
    return rows


def number(value: float | None) -> str:
    """Return a number with four digits that count, or nothing."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def split_table(runs: Sequence[RunFacts], group_by: str) -> list[dict[str, str]]:
    """Return a row a replica and a column a run: shapes in and out of the first, that is the full, batch."""
    columns = {run_label(run, group_by): dict(run.splits) for run in runs}
    wheres = dict.fromkeys(where for shapes in columns.values() for where in shapes if where.startswith("split 1 /"))
    ordered = sorted(wheres, key=lambda where: [as_number(word) or 0.0 for word in where.split()])
    return [
        {"replica": where.removeprefix("split 1 / ")} | {label: shapes.get(where, "") for label, shapes in columns.items()}
        for where in ordered
    ]


def differences(runs: Sequence[RunFacts], group_by: str) -> list[dict[str, str]]:
    """Return a row for each param that differs between runs, and a column a run."""
    names = sorted({name for run in runs for name in run.params if not name.startswith(_NOT_CONFIG)})
    rows = []
    for name in names:
        values = [run.params.get(name, "not set") for run in runs]
        if len(set(values)) > 1:
            rows.append({"param": name} | dict(zip([run_label(run, group_by) for run in runs], values, strict=True)))
    return rows


def page_link(page: Path) -> str:
    """Return the address that opens a page in a browser."""
    return page.absolute().as_uri()


__all__: list[Any] = ["compare_runs", "find_runs", "log_comparison", "page_link"]
