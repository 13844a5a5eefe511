"""The facts of a comparison: differing values, speed against a baseline run, and splits."""

import difflib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from dphybrid.util.errors import UserError
from dphybrid.util.text import printable

DEVICES, SEED = "devices", "train.seed"
_GROUPS = {"devices": DEVICES, "batch": "train.batch_size", "recipe": "recipe"}
"""Short names for what runs are often grouped by; any other name is a param's."""

_NOT_CONFIG = ("size.", "split.")
_SAME_SPEED = (SEED, "checkpoint.register_as")
"""What may differ between runs without being a reason for another baseline."""

Point = tuple[float, float]


@dataclass(frozen=True)
class RunFacts:
    """What a comparison needs of one run.

    steps, times: curve name -> points (step or seconds since the start, value). stages_ms: stage ->
    milliseconds of an average step.
    """

    run_id: str
    name: str
    status: str
    started: datetime
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    splits: Mapping[tuple[int, str], str]
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, list[Point]] = field(default_factory=dict)
    times: Mapping[str, list[Point]] = field(default_factory=dict)
    url: str = ""
    replicas: int = 1

    @property
    def samples_per_s(self) -> float | None:
        return self.metrics.get("summary/samples_per_s_median")

    def value(self, param: str) -> str:
        return self.params.get(param, "not set")


@dataclass(frozen=True)
class Speed:
    """A run's speed against that of its baseline. efficiency: a device, None where runs differ in something
    else than devices.

    against: the value that the baseline has of what runs are grouped by; among: what else differs between
    runs, and is the same in these.
    """

    ratio: float
    efficiency: float | None
    against: str
    among: str = ""


def param_of(group_by: str, runs: Sequence[RunFacts]) -> str:
    """Return the param that runs are grouped by. Raises UserError for one that no run has."""
    name = _GROUPS.get(group_by, group_by)
    if not any(name in run.params for run in runs):
        params = sorted({param for run in runs for param in run.params} | set(_GROUPS))
        near = difflib.get_close_matches(group_by, params, 3) or list(_GROUPS)
        raise UserError(f"--group-by {group_by}: no run has such a param; near: {', '.join(near)}")
    return name


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
        return (run.replicas if param == DEVICES else 0, _as_number(value) or 0.0, value, run.started)

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
                found[run.run_id] = Speed(ratio, fair, first, among)
    return found


def finals(runs: Sequence[RunFacts]) -> list[str]:
    """Return the names of the final metrics that some run has."""
    return sorted({name for run in runs for name in run.metrics if name.startswith("final/")})


def overview(runs: Sequence[RunFacts], param: str) -> list[dict[str, str]]:
    """Return a table row for each run: its name, differing values, metrics and speed."""
    names, speed = differing(runs), speeds(runs, param)
    rows = []
    for run in ordered(runs, param):
        own = speed.get(run.run_id)
        rows.append(
            {"run": run.name}
            | {name: run.value(name) for name in names}
            | {name.removeprefix("final/"): number(run.metrics.get(name)) for name in finals(runs)}
            | {
                "samples/s": number(run.samples_per_s),
                "speed-up": f"{own.ratio:.2f}" if own else "-" if run.samples_per_s else "",
                "efficiency": f"{own.efficiency:.0%}" if own and own.efficiency is not None else "",
                "step p50, ms": number(run.metrics.get("summary/step_ms_p50")),
                "step p95, ms": number(run.metrics.get("summary/step_ms_p95")),
                "training, s": number(run.metrics.get("summary/train_s")),
            }
        )
    kept = [key for key in rows[0] if key == "run" or any(row[key] for row in rows)]
    return [{key: row[key] for key in kept} for row in rows]


def split_table(runs: Sequence[RunFacts]) -> tuple[list[str], dict[tuple[str, ...], list[str]]]:
    """Return the replicas, and, by their shapes in and out of the first, that is the full, batch, the runs
    that were split so."""
    places = sorted({place for run in runs for place in run.splits})
    alike: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        alike.setdefault(tuple(run.splits.get(place, "") for place in places), []).append(run.name)
    return [f"replica {replica} / {block}" for replica, block in places], alike


def text_of(runs: Sequence[RunFacts], param: str) -> str:
    """Return a comparison for a terminal."""
    rows = overview(runs, param)
    leaves = [name.rpartition(".")[2] for name in rows[0]]
    titles = [leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(rows[0], leaves, strict=True)]
    cells = [titles, *([printable(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(titles))]
    left = [
        place == 0 or _as_number(cells[1][place].rstrip("%").replace(",", "")) is None
        for place in range(len(titles))
    ]
    lines = [
        "  ".join(
            c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in cells
    ]
    facts = runs[0].params
    shared = ", ".join(
        f"{name} {printable(facts[name])}"
        for name in ("recipe", DEVICES, "train.batch_size")
        if name in facts and name not in differing(runs)
    )
    notes = [f"the same in all: {shared}"] if shared else []
    if "speed-up" in rows[0]:
        notes.append(
            f"speed-up: relative to the first value of {param}, for runs equal in all else but the seed"
        )
    for run in ordered(runs, param):
        if run.stages_ms:
            total = sum(run.stages_ms.values()) or 1.0
            largest = sorted(run.stages_ms.items(), key=lambda item: -item[1])[:4]
            shares = ", ".join(f"{stage} {ms / total:.0%}" for stage, ms in largest)
            notes.append(f"{printable(run.name)}: {number(total)} ms a step: {shares}")
    return "\n".join([*lines, "", *notes]).rstrip()


def _as_number(text: str) -> float | None:
    """Return a text as a number, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def number(value: float | None) -> str:
    """Return a number with four digits that count, or nothing."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
