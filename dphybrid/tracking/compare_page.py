"""A comparison of runs: differing values, metrics, and speed relative to a baseline run; as text for a
terminal, or as a page. A row of the page's first table is a run, or several that differ only in their seed.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any

from dphybrid.tracking.compare import RunFacts
from dphybrid.tracking.html import (
    COLOURS,
    REFERENCE,
    Cell,
    Line,
    Mark,
    Section,
    Table,
    bars,
    cell,
    html_of,
    lines,
    number,
)
from dphybrid.tracking.writer import least_is_best
from dphybrid.util.digests import value_digest
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.text import printable

_DEVICES, _SEED, _SPEED = "devices", "train.seed", "summary_samples_per_s_median"
_NOT_CONFIG = ("size.", "split.", "valid.")
"""Beginnings of params that are derived from the config and the data."""
_SAME_SPEED = (_SEED, "checkpoint.register_as")
"""Params that may differ between a run and its baseline, as they do not change the speed."""
_OTHER_ROWS = "* measured on other validation rows than the others, so not comparable with them"
_SPEED_UP = "speed-up: relative to the first value of {}, other params equal except the seed"
_MOST_VALUES = 4
"""With more differing values than this, a merged row is named after its first run."""


def ordered(runs: Sequence[RunFacts], param: str) -> list[RunFacts]:
    """Return runs sorted by their value of `param`, fewest devices first: as a number (0 if it is not one),
    then as text; runs with equal values by their start. Raises UserError for a param that no run has."""
    params = {name for run in runs for name in run.params}
    if param not in params:
        raise UserError(f"--group-by {param}: no run has this param{suggestion(param, sorted(params))}")

    def order(run: RunFacts) -> tuple[int, float, str, datetime]:
        value = run.value(param)
        return run.replicas if param == _DEVICES else 0, cell(value).number or 0.0, value, run.started

    return sorted(runs, key=order)


def _differing(runs: Sequence[RunFacts]) -> list[str]:
    """Return the params that differ between runs: devices first, the seed last. Leaves out derived values
    and, if the recipes differ, params that not all of them have."""
    sets = [{name for name in run.params if not name.startswith(_NOT_CONFIG)} for run in runs]
    recipes = {run.value("recipe") for run in runs}
    # A param that only one recipe has would be a column that is empty for the others.
    names = sorted(set.intersection(*sets) if len(recipes) > 1 else set().union(*sets))
    found = [name for name in names if len({run.value(name) for run in runs}) > 1]
    return sorted(found, key=lambda name: (name == _SEED, name != _DEVICES))


def _grouped(runs: Sequence[RunFacts], names: Sequence[str]) -> dict[tuple[str, ...], list[RunFacts]]:
    groups: dict[tuple[str, ...], list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(tuple(map(run.value, names)), []).append(run)
    return groups


def _seeds_as_one(values: Sequence[str], members: Sequence[RunFacts]) -> RunFacts:
    """Merge runs that differ only in their seed, or in nothing, into one with the medians of times and speeds
    and the means of the other metrics. values: those in which they differ from other runs."""
    if len(members) == 1:
        return members[0]
    what = f"{len(members)} {'seeds' if len({run.value(_SEED) for run in members}) > 1 else 'runs'}"
    # Nobody can read a name of twenty values; the columns show them.
    words = [cell(value).text for value in values] if len(values) <= _MOST_VALUES else [members[0].name]
    every = sorted({run.measured for run in members})  # seeds may hold out different rows
    metrics, spread = dict[str, float](), dict[str, float]()
    for name in dict.fromkeys(name for run in members for name in run.metrics):
        found = [run.metrics[name] for run in members if name in run.metrics]
        # Medians of times, because one slow run would move their mean.
        is_time = name.startswith("summary_")
        metrics[name] = statistics.median(found) if is_time else sum(found) / len(found)
        if len(found) > 1 and all(map(math.isfinite, found)):  # else statistics.stdev fails
            spread[name] = statistics.stdev(found)
    stages = dict.fromkeys(stage for run in members for stage in run.stages_ms)
    return replace(
        members[0],
        name=" · ".join([*words, what]),
        url="",
        params={**members[0].params, _SEED: what},
        measured=every[0] if len(every) == 1 else f"{len(every)} sets {value_digest(every)[:8]}",
        metrics=metrics,
        spread=spread,
        stages_ms={s: statistics.fmean(run.stages_ms.get(s, 0.0) for run in members) for s in stages},
        members=members,
    )


def _speed_ups(runs: Sequence[RunFacts], param: str) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Return run id -> speed relative to its baseline, and that for each device; and the params in which a
    run equals its baseline: all that change the speed but `param`. The baseline is the first value of
    `param`, the median of its runs."""
    others = [name for name in _differing(runs) if name != param and name not in _SAME_SPEED]
    found = {}
    for members in _grouped(runs, others).values():
        timed = [run for run in members if run.metrics.get(_SPEED)]
        base = [run.metrics[_SPEED] for run in timed if run.value(param) == members[0].value(param)]
        if base and len(base) < len(timed):
            for run in timed:
                ratio = run.metrics[_SPEED] / statistics.median(base)
                found[run.run_id] = ratio, ratio * members[0].replicas / run.replicas
    return found, others


def _overview(runs: Sequence[RunFacts], param: str) -> dict[str, list[Cell]]:
    """Return title -> a cell for each run: its name, differing values, metrics and speed. Empty columns are
    left out; the best values are marked, of metrics among the rows that most runs were measured on."""
    common = Counter(run.measured for run in runs).most_common(1)[0][0]
    same, always = [run.measured == common for run in runs], [True] * len(runs)
    speed_ups, _ = _speed_ups(runs, param)

    def measured(name: str, best: Any = None, counted: Sequence[bool] = always) -> list[Cell]:
        cells, known = [], []
        for run, is_counted in zip(runs, counted, strict=True):
            value = run.metrics.get(name)
            spread = f" ±{run.spread[name]:.2g}" if name in run.spread else ""
            text = "-" if value is None else f"{number(value)}{spread}{'' if is_counted else '*'}"
            cells.append(Cell(text, value))
            known += [cells[-1]] if is_counted and value is not None and not math.isnan(value) else []
        # The best cells are found by their text: of numbers that look equal, all are the best.
        differ = best and len({c.text for c in known}) > 1
        winner = best(known, key=lambda c: c.number).text if differ else None
        return [c._replace(best=c.text == winner) for c in cells]

    def of_speed(which: int, form: str) -> list[Cell]:
        values = [speed_ups[run.run_id][which] if run.run_id in speed_ups else None for run in runs]
        return [Cell("-") if value is None else Cell(format(value, form), value) for value in values]

    columns = {"run": [Cell(run.name) for run in runs]}
    columns |= {name: [cell(run.value(name)) for run in runs] for name in _differing(runs)}
    # Of validation, then of test rows, which not every run has.
    names = sorted({name for run in runs for name in run.metrics})
    for name in [name for start in ("final_", "test/") for name in names if name.startswith(start)]:
        title = name.removeprefix("final_").replace("test/", "test ")
        columns[title] = measured(name, min if least_is_best(name) else max, same)
    unfinished = any(run.status != "FINISHED" for run in runs)
    columns |= {
        "measured on": [Cell(run.measured or "-") for run in runs] if not all(same) else [],
        "samples/s": measured(_SPEED, max),
        "speed-up": of_speed(0, ".2f"),
        "efficiency": of_speed(1, ".0%") if param == _DEVICES else [],
        "step p50, ms": measured("summary_step_ms_p50", min),
        "step p95, ms": measured("summary_step_ms_p95"),
        "training, s": measured("summary_train_s"),
        "status": [Cell(run.status.lower()) for run in runs] if unfinished else [],
    }
    return {name: cells for name, cells in columns.items() if any(c.text != "-" for c in cells)}


def text_of(runs: Sequence[RunFacts], param: str) -> str:
    """Return a comparison for a terminal: the overview, the params that all runs share, and the largest
    stages of each run."""
    runs = ordered(runs, param)
    table = _overview(runs, param)
    # `lr` instead of `train.lr`, unless two columns would have the same title.
    leaves = [name.rpartition(".")[2] for name in table]
    columns = []
    for (name, cells), leaf in zip(table.items(), leaves, strict=True):
        texts = [leaf if leaves.count(leaf) == 1 else name, *(printable(c.text) for c in cells)]
        width, is_left = max(map(len, texts)), all(c.number is None for c in cells)
        columns.append([text.ljust(width) if is_left else text.rjust(width) for text in texts])
    notes = [""]
    facts, unequal = runs[0].params, _differing(runs)
    common = [n for n in ("recipe", _DEVICES, "train.batch_size") if n in facts and n not in unequal]
    if common:
        notes += [f"the same in all: {', '.join(f'{n} {printable(cell(facts[n]).text)}' for n in common)}"]
    notes += [_SPEED_UP.format(param)] if "speed-up" in table else []
    notes += [_OTHER_ROWS] if "measured on" in table else []
    for run in runs:
        if total := sum(run.stages_ms.values()):
            largest = sorted(run.stages_ms.items(), key=lambda stage: -stage[1])[:4]
            shares = ", ".join(f"{stage} {ms / total:.0%}" for stage, ms in largest)
            notes.append(f"{printable(run.name)}: {number(total)} ms a step: {shares}")
    return "\n".join(["  ".join(line).rstrip() for line in zip(*columns, strict=True)] + notes).rstrip()


def write_comparison(runs: Sequence[RunFacts], folder: Path, param: str) -> Path:
    """Write the comparison page into `folder`; return its path. Raises UserError for a param that no run
    has."""
    runs, rows = (every := ordered(runs, param)), every
    if param != _SEED:
        names = [name for name in _differing(runs) if name != _SEED]
        rows = [_seeds_as_one(values, members) for values, members in _grouped(runs, names).items()]
    values = list(dict.fromkeys(run.value(param) for run in rows))
    # A colour for each value, or else for each row, so that their curves can be told apart.
    places = [values.index(run.value(param)) for run in rows] if len(values) > 1 else range(len(rows))
    colours = [COLOURS[place % len(COLOURS)] for place in places]
    marks = [
        Mark(colour, run.url, ", ".join(member.name for member in run.members))
        for run, colour in zip(rows, colours, strict=True)
    ]
    tables = [Table(_overview(rows, param), marks)]
    notes = [f"Made by dphybrid compare, {datetime.now():%Y-%m-%d %H:%M}. Click a title to sort by it."]
    notes += [] if _differing(runs) else ["These runs have equal configs."]
    notes += [f"{_OTHER_ROWS}."] if "measured on" in tables[0].columns else []
    if len(rows) < len(runs):
        notes += ["A row of several runs shows means (medians for times and speeds) ± standard deviations."]
        tables.append(Table(_overview(runs, param), folded="Each run"))
    metrics = sorted({name for run in runs for name in run.curves}, reverse=True)
    curves = [
        lines(_curves(rows, colours, name, place), x=x, y=name)
        for name in metrics
        for place, x in enumerate(("step", "seconds"))
    ]
    stages = [(run.name, run.stages_ms) for run in rows if run.stages_ms]
    speed_note = _SPEED_UP.format(param).capitalize() + "."
    if param == _DEVICES and any("*" in run.value(_DEVICES) for run in rows):
        speed_note += (
            " Virtual devices share hardware: they show the cost of splitting, not the gain of more."
        )
    sections = [
        Section(note=" ".join(notes), tables=tables),
        Section("Metrics", "Click a run's colour in the table to hide its curves.", figures=curves),
        Section("Milliseconds of a mean step, by stage", figures=[bars(stages, "milliseconds")]),
        Section("Speed", speed_note, figures=[_speed_figure(rows, param)]),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "index.html"
    file.write_text(html_of(f"{len(runs)} runs by {param}", sections, "80rem"), encoding="utf-8")
    return file


def _curves(rows: Sequence[RunFacts], colours: Sequence[str], name: str, place: int) -> list[Any]:
    """Return the lines of a metric. place: of the x values in a curve's points."""
    return [
        (
            [point[place] for point in points],
            [point[2] for point in points],
            {"color": colour, "gid": f"run{k}"},
        )
        for k, (row, colour) in enumerate(zip(rows, colours, strict=True))
        for run in row.members or [row]
        for points in [run.curves.get(name, [])]
    ]


def _speed_figure(rows: Sequence[RunFacts], param: str) -> str:
    """Draw the speed-up against the values of `param`: a line for each combination of the other values."""
    speed_ups, others = _speed_ups(rows, param)
    timed, of_devices = [run for run in rows if run.run_id in speed_ups], param == _DEVICES
    shown = list[Line]()
    for colour, (values, members) in zip(cycle(COLOURS), _grouped(timed, others).items(), strict=False):
        label = ", ".join(f"{name} {cell(value).text}" for name, value in zip(others, values, strict=True))
        xs = [run.replicas if of_devices else cell(run.value(param)).text for run in members]
        look = {"color": colour, "marker": "o", "linestyle": "-" if of_devices else "none"}
        ys = [speed_ups[run.run_id][0] for run in members]
        shown.append((xs, ys, {**look, "label": printable(label or "measured")[:58]}))
    counts = sorted({run.replicas for run in timed}) if of_devices else []
    if counts:
        shown.append((counts, [count / counts[0] for count in counts], {**REFERENCE, "label": "ideal"}))
    return lines(shown, x=param, y="speed-up", ticks=counts)
