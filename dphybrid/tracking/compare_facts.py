"""The facts of a comparison: differing values, speed against a baseline run, and splits."""

import difflib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from dphybrid.util.errors import UserError
from dphybrid.util.text import printable

DEVICES, SEED = "devices", "train.seed"
_FIRST_PARAMS = ("recipe", DEVICES, "train.batch_size")

_NOT_CONFIG = ("size.", "split.")
_SAME_SPEED = (SEED, "checkpoint.register_as")
"""What may differ between runs without being a reason for another baseline."""


@dataclass(frozen=True)
class RunFacts:
    """What a comparison needs of one run, or of several that differ in their seed alone (`seeds_as_one`).

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


@dataclass(frozen=True)
class Speed:
    """A run's speed against that of its baseline. efficiency: a device, None where runs differ in something
    else than devices.

    among: what else differs between runs, and is the same in these.
    """

    ratio: float
    efficiency: float | None
    among: str = ""


def param_of(group_by: str, runs: Sequence[RunFacts]) -> str:
    """Return the param that runs are grouped by. Raises UserError for one that no run has."""
    params = {param for run in runs for param in run.params}
    if group_by not in params:
        near = difflib.get_close_matches(group_by, params, 3) or [DEVICES]
        raise UserError(f"--group-by {group_by}: no run has such a param; near: {', '.join(near)}")
    return group_by


def differing(runs: Sequence[RunFacts]) -> list[str]:
    """Return the params that differ between runs: devices first, the seed last. Left out are those that
    follow from another one, and between recipes those that one of them lacks."""
    sets = [{name for name in run.params if not name.startswith(_NOT_CONFIG)} for run in runs]
    recipes = {run.value("recipe") for run in runs}
    names = sorted(set.intersection(*sets) if len(recipes) > 1 else set().union(*sets))
    found = [name for name in names if len({run.value(name) for run in runs}) > 1]
    return sorted(found, key=lambda name: (name == SEED, name != DEVICES))


def ordered(runs: Sequence[RunFacts], param: str) -> list[RunFacts]:
    """Return runs by their value of `param`: fewest devices first, then by number, then by text."""

    def order(run: RunFacts) -> tuple[int, float, str, datetime]:
        value = run.value(param)
        return (run.replicas if param == DEVICES else 0, as_number(value) or 0.0, value, run.started)

    return sorted(runs, key=order)


def speeds(runs: Sequence[RunFacts], param: str) -> dict[str, Speed]:
    """Return run id -> speed. The baseline is the first value of `param` among runs that agree in all else
    that differs; a run without a partner that has another value has no speed-up."""
    found = {}
    names = [name for name in differing(runs) if name != param and name not in _SAME_SPEED]
    groups: dict[tuple[tuple[str, str], ...], list[RunFacts]] = {}
    for run in ordered(runs, param):
        groups.setdefault(tuple((name, run.value(name)) for name in names), []).append(run)
    for same, members in groups.items():
        among = ", ".join(f"{name}={value}" for name, value in same)
        first = members[0].value(param)
        timed = {run.run_id: run.samples_per_s for run in members if run.samples_per_s}
        base = [timed[run.run_id] for run in members if run.value(param) == first and run.run_id in timed]
        partners = [run for run in members if run.run_id in timed and run.value(param) != first]
        for run in members if base and partners else []:
            if run.run_id in timed:
                ratio = timed[run.run_id] / statistics.median(base)
                fair = ratio * members[0].replicas / run.replicas if param == DEVICES else None
                found[run.run_id] = Speed(ratio, fair, among)
    return found


def seeds_as_one(runs: Sequence[RunFacts]) -> list[tuple[RunFacts, list[RunFacts]]]:
    """Return runs that differ in their seed alone as one, beside its members: with the medians of times and
    speeds, and the means of the other metrics."""
    names = [name for name in differing(runs) if name != SEED]
    groups: dict[tuple[str, ...], list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(tuple(map(run.value, names)), []).append(run)
    return [
        (members[0] if len(members) == 1 else _merged([*values, f"{len(members)} seeds"], members), members)
        for values, members in groups.items()
    ]


def _merged(words: Sequence[str], members: Sequence[RunFacts]) -> RunFacts:
    numbers = {
        name: [run.metrics[name] for run in members if name in run.metrics]
        for name in dict.fromkeys(name for run in members for name in run.metrics)
    }
    return replace(
        members[0],
        name=" · ".join(words),
        url="",
        params={**members[0].params, SEED: words[-1]},
        metrics={
            name: (statistics.median if name.startswith("summary/") else statistics.fmean)(values)
            for name, values in numbers.items()
        },
        spread={name: statistics.stdev(values) for name, values in numbers.items() if len(values) > 1},
        stages_ms={
            stage: statistics.fmean(run.stages_ms.get(stage, 0.0) for run in members)
            for stage in dict.fromkeys(stage for run in members for stage in run.stages_ms)
        },
    )


def overview(runs: Sequence[RunFacts], param: str) -> list[dict[str, str]]:
    """Return a table row for each run, in the order of `runs`: its name, differing values, metrics and
    speed."""
    names, speed = differing(runs), speeds(runs, param)
    finals = sorted({name for run in runs for name in run.metrics if name.startswith("final/")})
    rows = []
    for run in runs:
        own = speed.get(run.run_id)
        rows.append(
            {"run": run.name}
            | {name: run.value(name) for name in names}
            | {name.removeprefix("final/"): _shown(run, name) for name in finals}
            | {
                "samples/s": _shown(run, "summary/samples_per_s_median"),
                "speed-up": f"{own.ratio:.2f}" if own else "-" if run.samples_per_s else "",
                "efficiency": f"{own.efficiency:.0%}" if own and own.efficiency is not None else "",
                "step p50, ms": _shown(run, "summary/step_ms_p50"),
                "step p95, ms": _shown(run, "summary/step_ms_p95"),
                "training, s": _shown(run, "summary/train_s"),
                "status": "" if run.status == "FINISHED" else run.status.lower(),
            }
        )
    kept = [key for key in rows[0] if key == "run" or any(row[key] for row in rows)]
    return [{key: row[key] for key in kept} for row in rows]


def _shown(run: RunFacts, name: str) -> str:
    spread = f" ±{run.spread[name]:.2g}" if name in run.spread else ""
    return number(run.metrics.get(name)) + spread


def split_table(runs: Sequence[RunFacts]) -> tuple[list[str], dict[tuple[str, ...], list[str]]]:
    """Return the replicas, and, by their shapes in and out of the first, that is the full, batch, the runs
    that were split so."""
    places = sorted({place for run in runs for place in run.splits})
    alike: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        alike.setdefault(tuple(run.splits.get(place, "") for place in places), []).append(run.name)
    return [f"replica {replica} / {block}" for replica, block in places], alike


def text_of(runs: Sequence[RunFacts], param: str) -> str:
    """Return a comparison for a terminal: the overview, what all runs share, and the largest stages of
    each."""
    runs = ordered(runs, param)
    rows = overview(runs, param)
    leaves = [name.rpartition(".")[2] for name in rows[0]]
    titles = [leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(rows[0], leaves, strict=True)]
    columns = []
    for title, name in zip(titles, rows[0], strict=True):
        cells = [printable(row[name]) for row in rows]
        width = max(map(len, (title, *cells)))
        is_left = name == "run" or as_number(cells[0]) is None
        columns.append([cell.ljust(width) if is_left else cell.rjust(width) for cell in (title, *cells)])
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    facts, unequal = runs[0].params, differing(runs)
    common = [name for name in _FIRST_PARAMS if name in facts and name not in unequal]
    notes = [f"the same in all: {', '.join(f'{n} {printable(facts[n])}' for n in common)}"] if common else []
    if "speed-up" in rows[0]:
        notes.append(f"speed-up: relative to the first value of {param}, runs equal in all else but the seed")
    for run in runs:
        total = sum(run.stages_ms.values())
        largest = sorted(run.stages_ms.items(), key=lambda item: -item[1])[:4]
        if total:
            shares = ", ".join(f"{stage} {ms / total:.0%}" for stage, ms in largest)
            notes.append(f"{printable(run.name)}: {number(total)} ms a step: {shares}")
    return "\n".join([*lines, "", *notes]).rstrip()


def as_number(cell: str) -> float | None:
    """Return the number that a cell of the overview begins with, or None."""
    try:
        return float(cell.partition(" ±")[0].rstrip("%").replace(",", ""))
    except ValueError:
        return None


def number(value: float | None) -> str:
    """Return a number with four digits that count, or nothing."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
