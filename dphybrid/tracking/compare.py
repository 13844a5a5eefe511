"""A comparison of runs in MLflow, as a table for a terminal: metrics, speed, the values that differ. MLflow
draws the curves; `comparison_path` leads there."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote

from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils import get_results_from_paginated_fn

from dphybrid.tracking.html import number
from dphybrid.tracking.tracker import CHANGED_TAG, SWEEP_TAG, run_path
from dphybrid.tracking.writer import experiments_named
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.text import printable

_NEWEST_RUNS = 24
"""How many runs of an experiment are compared if the user names none."""
_PAGE = 1000
_MAX_VALUE = 1e308
"""MLflow stores an infinite value as a number above this one."""
_REPLICAS_TAG = "dphybrid.replicas"
_WIDTH = 80
_DEVICES, _SEED, _SPEED = "devices", "train.seed", "summary_samples_per_s_median"
_NOT_CONFIG = ("size.", "split.", "valid.")
"""Beginnings of params that are derived from the config and the data."""
_SAME_SPEED = (_SEED, "checkpoint.register_as")
"""Params that may differ between a run and its baseline, as they do not change the speed."""


@dataclass(frozen=True)
class RunFacts:
    """A run to compare. measured: number and digest of the validation rows; "" if unknown."""

    run_id: str
    experiment_id: str
    name: str
    status: str
    started: datetime
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    replicas: int = 1
    measured: str = ""

    def value(self, param: str) -> str:
        return self.params.get(param, "")


def read_runs(store_uri: str, run_ids: Sequence[str]) -> list[RunFacts]:
    """Return the recorded facts of runs, in the given order. Raises UserError for a run that cannot be read,
    and for fewer than two runs."""
    client = MlflowClient(tracking_uri=store_uri)
    unique = list(dict.fromkeys(run_ids))
    if len(unique) < 2:
        there = f"there is one: {unique[0]}" if unique else "no run has finished"
        raise UserError(f"a comparison needs at least two runs, and {there}")
    return [_read_run(client, run_id) for run_id in unique]


def _read_run(client: MlflowClient, run_id: str) -> RunFacts:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise UserError(f"run {run_id!r}: cannot be read ({str(error).splitlines()[0][:200]})") from error
    metrics, tags = run.data.metrics, run.data.tags
    changed = {tag[len(CHANGED_TAG) :]: both for tag, both in tags.items() if tag.startswith(CHANGED_TAG)}
    return RunFacts(
        run_id=run_id,
        experiment_id=run.info.experiment_id,
        name=run.info.run_name or run_id,
        status=run.info.status,
        started=datetime.fromtimestamp(run.info.start_time / 1000),
        params=dict(run.data.params) | changed,
        metrics={
            name: math.copysign(math.inf, v) if abs(v) > _MAX_VALUE else v for name, v in metrics.items()
        },
        replicas=int(tags.get(_REPLICAS_TAG, "1")),
        measured=_measured(run),
    )


def _measured(run: Run) -> str:
    """Return number and digest of the validation rows of a run; "" if they are unknown."""
    params = run.data.params
    known = "valid.digest" in params
    return f"{int(params['valid.rows']):,} rows {params['valid.digest'][:8]}" if known else ""


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
    finished = [run.info.run_id for run in runs if run.info.status == "FINISHED"]
    return finished if sweep is not None else finished[-_NEWEST_RUNS:]


def page_path(uri: str, experiment: str, run: str | None) -> str:
    """Return the part after `#` in the address of a run (name or id), or of the newest run's experiment.
    Raises UserError if no run has that name."""
    client = MlflowClient(tracking_uri=uri)
    if run is None:
        found = [each.experiment_id for each in experiments_named(client, experiment)]
        # A recipe has an experiment of its own: that of the newest run.
        newest = client.search_runs(found, order_by=["attributes.start_time DESC"], max_results=1)
        there = f"/experiments/{newest[0].info.experiment_id}/runs" if newest else "/experiments"
        return f"{there}?workflowType=machine_learning"
    (run_id,) = find_runs(uri, experiment, [run])
    there = client.get_run(run_id).info.experiment_id
    return run_path(there, run_id)


def comparison_path(runs: Sequence[RunFacts]) -> str:
    """Return the part after `#` in the address of MLflow's own comparison of runs."""
    run_ids, experiments = [run.run_id for run in runs], sorted({run.experiment_id for run in runs})
    return f"/compare-runs?runs={quote(json.dumps(run_ids))}&experiments={quote(json.dumps(experiments))}"


def table_of(runs: Sequence[RunFacts], param: str) -> str:
    """Return a comparison of runs, each in a column, as many side by side as 80 characters hold. Runs are in
    the order of their value of `param`. Raises UserError for a param that no run has."""
    runs = _ordered(runs, param)
    rows = _rows(runs, param)
    titles, texts = list(rows), list(rows.values())
    width = max(map(len, titles))
    columns = [[printable(row[number])[: _WIDTH - width - 2] for row in texts] for number in range(len(runs))]
    blocks = [_lines(titles, block, width) for block in _blocks(columns, width)]
    notes = []
    facts, unequal = runs[0].params, _differing(runs)
    common = [n for n in ("recipe", _DEVICES, "train.batch_size") if n in facts and n not in unequal]
    if common:
        notes += [f"the same in all: {', '.join(f'{n} {printable(_shown(facts[n]))}' for n in common)}"]
    if "speed-up" in rows:
        notes += [f"speed-up: relative to the first value of {param}, other params equal except the seed"]
    if "measured on" in rows:
        notes += ["* measured on other validation rows than the others, so not comparable with them"]
    return "\n\n".join([*blocks, "\n".join(notes)]).rstrip()


def _blocks(columns: Sequence[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Yield the columns in groups that fit beside titles of `width` characters."""
    block, used = list[Sequence[str]](), width
    for column in columns:
        wide = 2 + max(map(len, column))
        if block and used + wide > _WIDTH:
            yield block
            block, used = [], width
        block, used = [*block, column], used + wide
    yield block


def _lines(titles: Sequence[str], columns: Sequence[Sequence[str]], width: int) -> str:
    """Return columns of text side by side, after their titles."""
    widths = [max(map(len, column)) for column in columns]
    rows = zip(titles, *columns, strict=True)
    return "\n".join(
        "  ".join([title.ljust(width), *(text.rjust(w) for text, w in zip(row, widths, strict=True))])
        for title, *row in rows
    )


def _ordered(runs: Sequence[RunFacts], param: str) -> list[RunFacts]:
    """Return runs sorted by their value of `param`, fewest devices first: as a number (0 if it is not one),
    then as text; runs with equal values by their start."""
    params = {name for run in runs for name in run.params}
    if param not in params:
        raise UserError(f"--group-by {param}: no run has this param{suggestion(param, sorted(params))}")

    def order(run: RunFacts) -> tuple[int, float, str, datetime]:
        value = run.value(param)
        return run.replicas if param == _DEVICES else 0, _number(value) or 0.0, value, run.started

    return sorted(runs, key=order)


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _shown(value: str) -> str:
    """Return a param's value for the table: long numbers shortened, `-` for none."""
    if value in ("", "None"):
        return "-"
    parsed = _number(value)
    return value if parsed is None or len(value) < 8 else number(parsed)


def _differing(runs: Sequence[RunFacts]) -> list[str]:
    """Return the params that differ between runs: devices first, the seed last. Leaves out derived values
    and, if the recipes differ, params that not all of them have."""
    sets = [{name for name in run.params if not name.startswith(_NOT_CONFIG)} for run in runs]
    recipes = {run.value("recipe") for run in runs}
    names = sorted(set.intersection(*sets) if len(recipes) > 1 else set().union(*sets))
    found = [name for name in names if len({run.value(name) for run in runs}) > 1]
    return sorted(found, key=lambda name: (name == _SEED, name != _DEVICES))


def _speed_ups(runs: Sequence[RunFacts], param: str) -> dict[str, tuple[float, float]]:
    """Return run id -> speed relative to its baseline, and that for each device. The baseline of runs that
    are equal in all that changes the speed but `param`: the first value of it, the median of its runs."""
    others = [name for name in _differing(runs) if name != param and name not in _SAME_SPEED]
    groups: dict[tuple[str, ...], list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(tuple(map(run.value, others)), []).append(run)
    found = {}
    for members in groups.values():
        timed = [run for run in members if run.metrics.get(_SPEED)]
        base = [run.metrics[_SPEED] for run in timed if run.value(param) == members[0].value(param)]
        if base and len(base) < len(timed):
            for run in timed:
                ratio = run.metrics[_SPEED] / statistics.median(base)
                found[run.run_id] = ratio, ratio * members[0].replicas / run.replicas
    return found


def _rows(runs: Sequence[RunFacts], param: str) -> dict[str, list[str]]:
    """Return title -> a text for each run: its name, metrics, speed and differing values. Rows without a
    value are left out."""
    common = Counter(run.measured for run in runs).most_common(1)[0][0]
    same, speed_ups = [run.measured == common for run in runs], _speed_ups(runs, param)

    def measured(name: str) -> list[str]:
        return [number(run.metrics[name]) if name in run.metrics else "-" for run in runs]

    def of_speed(which: int, form: str) -> list[str]:
        return [format(speed_ups[r.run_id][which], form) if r.run_id in speed_ups else "-" for r in runs]

    rows = {"run": [run.name for run in runs]}
    # Of validation, then of test rows, which not every run has.
    names = sorted({name for run in runs for name in run.metrics})
    for name in [name for start in ("final_", "test/") for name in names if name.startswith(start)]:
        texts = zip(measured(name), same, strict=True)
        title = name.removeprefix("final_").replace("test/", "test ")
        rows[title] = [text if counted or text == "-" else f"{text}*" for text, counted in texts]
    rows |= {
        "samples/s": measured(_SPEED),
        "speed-up": of_speed(0, ".2f"),
        "efficiency": of_speed(1, ".0%") if param == _DEVICES else [],
        "step p50, ms": measured("summary_step_ms_p50"),
        "step p95, ms": measured("summary_step_ms_p95"),
        "training, s": measured("summary_train_s"),
        **{name: [_shown(run.value(name)) for run in runs] for name in _differing(runs)},
        "measured on": [run.measured or "-" for run in runs] if not all(same) else [],
        "status": [r.status.lower() for r in runs] if any(r.status != "FINISHED" for r in runs) else [],
    }
    return {name: texts for name, texts in rows.items() if any(text != "-" for text in texts)}
