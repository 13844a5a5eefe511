"""A comparison of runs: differing values, speed relative to a baseline run, and splits; as text for a
terminal, or as a page. The page is one file with its data and plotly inside: it needs no server and no
network.

A row of the first table is a run, or several runs that differ only in their seed, merged.
"""

import difflib
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dphybrid.tracking.compare import RunFacts
from dphybrid.tracking.pages import (
    COLOURS,
    Cell,
    Figure,
    Section,
    Table,
    as_number,
    figure,
    html_of,
    line,
    number,
    shown,
)
from dphybrid.tracking.writer import least_is_best
from dphybrid.util.digests import value_digest
from dphybrid.util.errors import UserError
from dphybrid.util.text import printable

_DEVICES, _SEED = "devices", "train.seed"
_FIRST_PARAMS = ("recipe", _DEVICES, "train.batch_size")
_NOT_CONFIG = ("size.", "split.", "valid.")
_OTHER_ROWS = "* measured on other validation rows than the others, so not comparable with them"
_SAME_SPEED = (_SEED, "checkpoint.register_as")
"""Params that may differ between a run and its baseline, as they do not change the speed."""

_MOST_VALUES = 4
"""With more differing values than this, a merged row is named after its first run."""
_VIRTUAL = " Virtual devices share hardware: they show the cost of splitting, not the gain from more GPUs."

_Rows = Sequence[tuple[RunFacts, Sequence[RunFacts]]]
"""For each row of a table, the run that it shows and the runs that this one summarizes."""


@dataclass(frozen=True)
class _Speed:
    """A run's speed relative to its baseline. efficiency: the speed-up for each device; None if the runs are
    not compared by devices.

    among: the other differing params, which have these values in the run and in its baseline.
    """

    ratio: float
    efficiency: float | None
    among: str = ""


def param_of(group_by: str, runs: Sequence[RunFacts]) -> str:
    """Return the param that runs are grouped by. Raises UserError for one that no run has."""
    params = {param for run in runs for param in run.params}
    if group_by not in params:
        near = difflib.get_close_matches(group_by, params, 3) or [_DEVICES]
        raise UserError(f"--group-by {group_by}: no run has this param; did you mean {', '.join(near)}?")
    return group_by


def _differing(runs: Sequence[RunFacts]) -> list[str]:
    """Return the params that differ between runs: devices first, the seed last. Leaves out derived values
    (`_NOT_CONFIG`) and, if the recipes differ, params that not all of them have."""
    sets = [{name for name in run.params if not name.startswith(_NOT_CONFIG)} for run in runs]
    recipes = {run.value("recipe") for run in runs}
    # A param that only one recipe has would be a column that is empty for the others.
    names = sorted(set.intersection(*sets) if len(recipes) > 1 else set().union(*sets))
    found = [name for name in names if len({run.value(name) for run in runs}) > 1]
    return sorted(found, key=lambda name: (name == _SEED, name != _DEVICES))


def _ordered(runs: Sequence[RunFacts], param: str) -> list[RunFacts]:
    """Return runs sorted by their value of `param`, fewest devices first: as a number (0 if it is not one),
    then as text; runs with equal values by their start."""

    def order(run: RunFacts) -> tuple[int, float, str, datetime]:
        value = run.value(param)
        return (run.replicas if param == _DEVICES else 0, as_number(value) or 0.0, value, run.started)

    return sorted(runs, key=order)


def _speeds(runs: Sequence[RunFacts], param: str) -> dict[str, _Speed]:
    """Return run id -> speed. Runs are compared only if their other params are equal. Of those, the baseline
    is the first value of `param`; if all have the same value, they have no speed-up."""
    found = {}
    names = [name for name in _differing(runs) if name != param and name not in _SAME_SPEED]
    for values, members in _grouped(_ordered(runs, param), names).items():
        among = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        first = members[0].value(param)
        timed = {run.run_id: (run, run.samples_per_s) for run in members if run.samples_per_s}
        base = [speed for run, speed in timed.values() if run.value(param) == first]
        if base and len(base) < len(timed):
            for run_id, (run, speed) in timed.items():
                ratio = speed / statistics.median(base)
                efficiency = ratio * members[0].replicas / run.replicas if param == _DEVICES else None
                found[run_id] = _Speed(ratio, efficiency, among)
    return found


def _grouped(runs: Sequence[RunFacts], params: Sequence[str]) -> dict[tuple[str, ...], list[RunFacts]]:
    groups: dict[tuple[str, ...], list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(tuple(map(run.value, params)), []).append(run)
    return groups


def _seeds_as_one(runs: Sequence[RunFacts]) -> list[tuple[RunFacts, list[RunFacts]]]:
    """Merge runs that differ only in their seed, or in nothing, into one with the medians of times and speeds
    and the means of the other metrics; return each merged run with its members."""
    names = [name for name in _differing(runs) if name != _SEED]
    rows = []
    for values, members in _grouped(runs, names).items():
        what = "seeds" if len({run.value(_SEED) for run in members}) > 1 else "runs"
        # Nobody can read a name of twenty values; the columns show them.
        words = values if len(values) <= _MOST_VALUES else [members[0].name]
        merged = _merged([*words, f"{len(members)} {what}"], members) if len(members) > 1 else members[0]
        rows.append((merged, members))
    return rows


def _merged(words: Sequence[str], members: Sequence[RunFacts]) -> RunFacts:
    numbers = {
        name: [run.metrics[name] for run in members if name in run.metrics]
        for name in dict.fromkeys(name for run in members for name in run.metrics)
    }
    return replace(
        members[0],
        name=" · ".join(words),
        url="",
        measured=_measured(members),
        params={**members[0].params, _SEED: words[-1]},
        # Medians of times, because one slow run would move their mean.
        metrics={
            name: statistics.median(values) if name.startswith("summary_") else sum(values) / len(values)
            for name, values in numbers.items()
        },
        # statistics.stdev fails for values that are not finite.
        spread={
            name: statistics.stdev(values)
            for name, values in numbers.items()
            if len(values) > 1 and all(map(math.isfinite, values))
        },
        stages_ms={
            stage: statistics.fmean(run.stages_ms.get(stage, 0.0) for run in members)
            for stage in dict.fromkeys(stage for run in members for stage in run.stages_ms)
        },
    )


def _measured(members: Sequence[RunFacts]) -> str:
    """Return the rows that several runs were measured on; seeds may hold out different ones."""
    every = sorted({run.measured for run in members})
    return every[0] if len(every) == 1 else f"{len(every)} sets {value_digest(every)[:8]}"


def _overview(runs: Sequence[RunFacts], param: str) -> dict[str, list[Cell]]:
    """Return title -> a cell for each run: its name, differing values, metrics and speed. Empty columns are
    left out; the best values are marked."""
    speed = _speeds(runs, param)
    found = [speed.get(run.run_id) for run in runs]
    finals = sorted({name for run in runs for name in run.metrics if name.startswith("final_")})
    # Metrics are compared only among the rows that most runs were measured on.
    common = Counter(run.measured for run in runs).most_common(1)[0][0]
    same = [run.measured == common for run in runs]
    columns: dict[str, list[Cell]] = {
        "run": [Cell(run.name) for run in runs],
        **{
            name: [Cell(shown(run.value(name)), as_number(run.value(name))) for run in runs]
            for name in _differing(runs)
        },
        **{
            name.removeprefix("final_"): _best(
                [_cell(run, name, is_same) for run, is_same in zip(runs, same, strict=True)],
                min if least_is_best(name) else max,
                same,
            )
            for name in finals
        },
        "measured on": [Cell("" if all(same) else run.measured) for run in runs],
        "samples/s": _best([_cell(run, "summary_samples_per_s_median") for run in runs], max),
        "speed-up": [
            # "-": the run was timed but has no baseline
            Cell(f"{own.ratio:.2f}", own.ratio) if own else Cell("-" if run.samples_per_s else "")
            for run, own in zip(runs, found, strict=True)
        ],
        "efficiency": [
            Cell(f"{own.efficiency:.0%}", own.efficiency) if own and own.efficiency is not None else Cell("")
            for own in found
        ],
        "step p50, ms": _best([_cell(run, "summary_step_ms_p50") for run in runs], min),
        "step p95, ms": [_cell(run, "summary_step_ms_p95") for run in runs],
        "training, s": [_cell(run, "summary_train_s") for run in runs],
        "status": [Cell(run.status.lower()) for run in runs],
    }
    if all(run.status == "FINISHED" for run in runs):
        del columns["status"]
    return {
        title: [cell if cell.text else Cell("-") for cell in cells]
        for title, cells in columns.items()
        if any(cell.text for cell in cells)
    }


def _cell(run: RunFacts, metric: str, comparable: bool = True) -> Cell:
    if metric not in run.metrics:
        return Cell("")
    value, spread = run.metrics[metric], f" ±{run.spread[metric]:.2g}" if metric in run.spread else ""
    return Cell(f"{number(value)}{spread}{'' if comparable else '*'}", value)


def _best(cells: list[Cell], best: Any, counts: Sequence[bool] = ()) -> list[Cell]:
    """Return cells with the best one marked, of those that count (default: all), if there are several."""
    known = [
        (cell.value, cell.text)
        for cell, is_counted in zip(cells, counts or [True] * len(cells), strict=True)
        if is_counted and cell.value is not None and not math.isnan(cell.value)
    ]
    # The best cells are found by their text: of numbers that look equal, all are the best.
    winner = best(known)[1] if len(known) > 1 else None
    return [replace(cell, best=cell.text == winner) for cell in cells]


def _split_table(runs: Sequence[RunFacts]) -> tuple[list[str], dict[tuple[str, ...], list[str]]]:
    """Return the titles of a table's lines (replica and block) and, for each distinct split of a full batch
    (the shapes, one a line), the names of the runs that were split like this."""
    places = sorted({place for run in runs for place in run.splits})
    alike: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        alike.setdefault(tuple(run.splits.get(place, "") for place in places), []).append(run.name)
    return [f"replica {replica} / {block}" for replica, block in places], alike


def text_of(runs: Sequence[RunFacts], param: str) -> str:
    """Return a comparison for a terminal: the overview, the params that all runs share, and the largest
    stages of each run."""
    runs = _ordered(runs, param)
    table = _overview(runs, param)
    # `lr` instead of `train.lr`, unless two columns would have the same title.
    leaves = [name.rpartition(".")[2] for name in table]
    columns = []
    for (name, cells), leaf in zip(table.items(), leaves, strict=True):
        texts = [leaf if leaves.count(leaf) == 1 else name, *(printable(cell.text) for cell in cells)]
        width = max(map(len, texts))
        is_left = all(cell.value is None for cell in cells)
        columns.append([text.ljust(width) if is_left else text.rjust(width) for text in texts])
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    facts, unequal = runs[0].params, _differing(runs)
    common = [name for name in _FIRST_PARAMS if name in facts and name not in unequal]
    notes = (
        [f"the same in all: {', '.join(f'{n} {printable(shown(facts[n]))}' for n in common)}"]
        if common
        else []
    )
    if "speed-up" in table:
        notes.append(f"speed-up: relative to the first value of {param}, other params equal except the seed")
    if "measured on" in table:
        notes.append(_OTHER_ROWS)
    for run in runs:
        total = sum(run.stages_ms.values())
        largest = sorted(run.stages_ms.items(), key=lambda item: -item[1])[:4]
        if total:
            shares = ", ".join(f"{stage} {ms / total:.0%}" for stage, ms in largest)
            notes.append(f"{printable(run.name)}: {number(total)} ms a step: {shares}")
    return "\n".join([*lines, "", *notes]).rstrip()


def write_comparison(runs: Sequence[RunFacts], folder: Path, group_by: str) -> Path:
    """Write the comparison page into `folder`; return its path. Raises UserError for a param that no run
    has."""
    param = param_of(group_by, runs)
    runs = _ordered(runs, param)
    rows = [(run, [run]) for run in runs] if param == _SEED else _seeds_as_one(runs)
    made = (
        f"Made by dphybrid compare, {datetime.now():%Y-%m-%d %H:%M}. Click a title to sort; hover for values."
    )
    tables, notes = [_table(rows, param)], list[str]()
    if "measured on" in tables[0].columns:
        notes.append(f"{_OTHER_ROWS}.")
    if len(rows) < len(runs):
        notes.append(
            "A row of several runs shows means (medians for times and speeds) ± standard deviations."
        )
        tables.append(replace(_table([(run, [run]) for run in runs], param), folded="Each run"))
    page = html_of(
        f"{len(runs)} runs by {param}",
        [
            Section(lead=made + ("" if _differing(runs) else " These runs have equal configs.")),
            Section("Runs, and what differs", " ".join(notes), tables=tables),
            *_charts(rows, param),
            *_splits(runs),
        ],
        clickable=True,
        width="80rem",
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "index.html"
    file.write_text(page, encoding="utf-8")
    return file


def _table(rows: _Rows, param: str) -> Table:
    runs = [run for run, _ in rows]
    columns = _overview(runs, param)
    columns["run"] = [
        replace(
            cell,
            colour=colour,
            link=run.url if run.url.startswith(("http://", "https://")) else "",
            title=", ".join(member.name for member in members),
        )
        for cell, (run, members), colour in zip(columns["run"], rows, _colours(runs, param), strict=True)
    ]
    return Table(list(columns), list(zip(*columns.values(), strict=True)))


def _splits(runs: Sequence[RunFacts]) -> list[Section]:
    places, alike = _split_table(runs)
    titles = [
        f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0] for names in alike.values()
    ]
    lines = [[place, *shapes] for place, *shapes in zip(places, *alike, strict=True)]
    return (
        [Section("How a full batch was split", tables=[Table(["replica", *titles], lines)])] if places else []
    )


def _charts(rows: _Rows, param: str) -> list[Section]:
    runs = [run for run, _ in rows]
    virtual = _VIRTUAL if param == _DEVICES and any("*" in run.value(_DEVICES) for run in runs) else ""
    about = f"Speed-up relative to the first value of {param}; other params are equal, except for the seed."
    stages = "Mean milliseconds of a step, by stage."
    curves = "Click a name to hide its curves; double-click to see only them."
    return [
        Section("Speed", about + virtual, figures=_speed(runs, param), wide=True),
        Section("Where a step's time goes", stages, figures=_stages(runs), wide=True),
        Section("Metrics", curves, figures=_curves(rows, param), wide=True),
    ]


def _colours(runs: Sequence[RunFacts], param: str) -> list[str]:
    """Return a colour for each run: one for each value of `param`; if all have the same value, one for each
    run, so that their curves can be told apart."""
    values = list(dict.fromkeys(run.value(param) for run in runs))
    places = [values.index(run.value(param)) for run in runs] if len(values) > 1 else range(len(runs))
    return [COLOURS[place % len(COLOURS)] for place in places]


def _speed(runs: Sequence[RunFacts], param: str) -> list[Figure]:
    """Draw the speed-up against the values of `param`: a line for each combination of the other values."""
    speed = _speeds(runs, param)
    series: dict[str, list[RunFacts]] = {}
    for run in runs:
        if run.run_id in speed:
            series.setdefault(speed[run.run_id].among or "measured", []).append(run)
    if len({run.value(param) for members in series.values() for run in members}) < 2:
        return []
    scaling = param == _DEVICES
    traces = [
        line(
            [(run.replicas if scaling else run.value(param), speed[run.run_id].ratio) for run in members],
            among,
            "lines+markers" if scaling else "markers",
            text=[f"{run.name}: {run.samples_per_s:,.0f} samples/s" for run in members],
            hovertemplate="%{text}<br>speed-up %{y:.2f}<extra></extra>",
            marker={"size": 10, "color": COLOURS[place % len(COLOURS)]},
        )
        for place, (among, members) in enumerate(series.items())
    ]
    axis: Figure = {"title": {"text": param}, "type": "category"}
    if scaling:
        counts = sorted({count for trace in traces for count in trace["x"]})
        ideal = [(count, count / counts[0]) for count in counts]
        traces.append(line(ideal, "ideal", line={"dash": "dash", "color": "#999"}, hoverinfo="skip"))
        axis = {"title": {"text": _DEVICES}, "tickvals": counts}
    y = {"title": {"text": "speed-up"}, "rangemode": "tozero"}
    return [figure(traces, xaxis=axis, yaxis=y, showlegend=True, legend={"orientation": "h", "y": -0.3})]


def _stages(runs: Sequence[RunFacts]) -> list[Figure]:
    """Draw a stacked bar for each run, the largest stage first."""
    timed = [run for run in runs if run.stages_ms]
    totals: Any = Counter()
    for run in timed:
        totals.update(run.stages_ms)
    names = [run.name if len(run.name) <= 36 else f"{run.name[:35]}…" for run in timed]
    places = list(range(len(timed)))
    traces: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": stage,
            "marker": {"color": COLOURS[place % len(COLOURS)]},
            # Numbers, not names: plotly would stack two runs of one name into one bar.
            "y": places,
            "x": [run.stages_ms.get(stage, 0.0) for run in timed],
            "text": [f"{name}, {stage}" for name in names],
            "textposition": "none",
            "hovertemplate": "%{text}: %{x:.3f} ms<extra></extra>",
        }
        for place, (stage, ms) in enumerate(totals.most_common())
        if ms > 0
    ]
    axis = {"tickvals": places, "ticktext": names, "automargin": True, "autorange": "reversed"}
    legend = {"orientation": "h", "traceorder": "normal", "y": -40 / (100 + 34 * len(timed))}
    height = 240 + 34 * len(timed)
    drawn = figure(traces, barmode="stack", height=height, yaxis=axis, legend=legend, showlegend=True)
    return [drawn] if traces else []


def _curves(rows: _Rows, param: str) -> list[Figure]:
    """Draw a panel for each metric with a curve for each run, over steps or seconds."""
    names = sorted({name for _, members in rows for run in members for name in run.curves}, reverse=True)
    drawn = [
        (row, colour, panel, points)
        for (row, members), colour in zip(rows, _colours([run for run, _ in rows], param), strict=True)
        for panel, name in enumerate(names, start=1)
        for points in (run.curves[name] for run in members if run.curves.get(name))
    ]
    if not drawn:
        return []
    steps, seconds = ([[point[place] for point in points] for *_, points in drawn] for place in (0, 1))
    listed = [row.run_id for row, *_ in drawn]
    traces = [
        line(
            [(point[0], point[2]) for point in points],
            row.name,
            "lines+markers" if len(points) < 30 else "lines",
            xaxis=f"x{panel}",
            yaxis=f"y{panel}",
            legendgroup=row.run_id,
            showlegend=listed.index(row.run_id) == place,  # one entry for all curves of a row
            line={"color": colour, "width": 2},
            hovertemplate="%{fullData.name}<br>%{x}: %{y:.5g}<extra></extra>",
        )
        for place, (row, colour, panel, points) in enumerate(drawn)
    ]
    lines = -(-len(names) // 2)
    # standoff: otherwise plotly writes a title over long tick labels
    titles = [{"text": name, "standoff": 8} for name in names]
    # plotly calls the first axis yaxis
    axes: Figure = {
        f"yaxis{n}": {"title": title, "automargin": True} for n, title in enumerate(titles, start=1)
    }
    axes["yaxis"] = axes.pop("yaxis1")
    types = {kind: {f"yaxis{n}.type": kind for n in range(1, len(names) + 1)} for kind in ("linear", "log")}
    menus = [
        _buttons(0.0, "restyle", {"over steps": {"x": steps}, "over seconds": {"x": seconds}}),
        _buttons(0.3, "relayout", {"linear": types["linear"], "logarithmic": types["log"]}),
    ]
    grid = {"rows": lines, "columns": min(2, len(names)), "pattern": "independent", "xgap": 0.15, "ygap": 0.2}
    layout: Figure = {
        "legend": {"orientation": "h", "y": -0.15 / lines},
        "margin": {"l": 60, "r": 15, "t": 60, "b": 50},
    }
    height = 160 + 300 * lines
    return [figure(traces, grid=grid, height=height, updatemenus=menus, showlegend=True, **layout, **axes)]


def _buttons(x: float, method: str, choices: dict[str, Figure]) -> Figure:
    buttons = [{"label": label, "method": method, "args": [values]} for label, values in choices.items()]
    place = {"x": x, "y": 1.0, "xanchor": "left", "yanchor": "bottom", "pad": {"b": 15}}
    return {"type": "buttons", "direction": "left", "showactive": True, "buttons": buttons} | place
