"""A comparison of runs: differing values, speed relative to a baseline run, and splits; as text for a
terminal, or as a page. The page is one file with its data and plotly inside: it needs no server and no
network.

A row of the first table is a run, or several runs that differ only in their seed, merged.
"""

import difflib
import html
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from plotly.colors import qualitative

from dphybrid.tracking.compare import RunFacts
from dphybrid.tracking.report import rendered
from dphybrid.tracking.writer import least_is_best
from dphybrid.util.digests import value_digest
from dphybrid.util.errors import UserError
from dphybrid.util.text import printable

_Cell = tuple[str, float | None]
"""The text of a table's cell, and its number, or None if the text is not a number."""

_DEVICES, _SEED = "devices", "train.seed"
_FIRST_PARAMS = ("recipe", _DEVICES, "train.batch_size")
_NOT_CONFIG = ("size.", "split.", "valid.")
_OTHER_ROWS = "* measured on other validation rows than the others, so not comparable with them"
_SAME_SPEED = (_SEED, "checkpoint.register_as")
"""Params that may differ between a run and its baseline, as they do not change the speed."""

_Figure = dict[str, Any]
_COLOURS = (*qualitative.T10, *qualitative.Bold)  # more colours than a step has stages
_LAYOUT: _Figure = {
    "margin": {"l": 55, "r": 15, "t": 35, "b": 45},
    "font": {"size": 13},
    "hovermode": "closest",
    "legend": {"orientation": "h", "y": -0.25},
}
_MOST_VALUES = 4
"""With more differing values than this, a merged row is named after its first run."""
_BEST_COLUMNS = {"samples/s": max, "step p50, ms": min}
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
        return (run.replicas if param == _DEVICES else 0, _as_number(value) or 0.0, value, run.started)

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
            name: statistics.median(values) if name.startswith("summary/") else sum(values) / len(values)
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


def _comparable(runs: Sequence[RunFacts]) -> str:
    """Return the rows that most runs were measured on: only their metrics are compared."""
    return Counter(run.measured for run in runs).most_common(1)[0][0]


def _overview(runs: Sequence[RunFacts], param: str) -> dict[str, list[_Cell]]:
    """Return title -> a cell for each run: its name, differing values, metrics and speed. Empty columns are
    left out."""
    speed = _speeds(runs, param)
    found = [speed.get(run.run_id) for run in runs]
    finals = sorted({name for run in runs for name in run.metrics if name.startswith("final/")})
    none: _Cell = ("", None)
    common = _comparable(runs)
    others = any(run.measured != common for run in runs)
    columns: dict[str, list[_Cell]] = {
        "run": [(run.name, None) for run in runs],
        **{
            name: [(run.value(name), _as_number(run.value(name))) for run in runs]
            for name in _differing(runs)
        },
        **{name.removeprefix("final/"): [_metric(run, name, common) for run in runs] for name in finals},
        "measured on": [(run.measured if others else "", None) for run in runs],
        "samples/s": [_cell(run, "summary/samples_per_s_median") for run in runs],
        "speed-up": [
            # "-": the run was timed but has no baseline
            (f"{own.ratio:.2f}", own.ratio) if own else ("-", None) if run.samples_per_s else none
            for run, own in zip(runs, found, strict=True)
        ],
        "efficiency": [
            (f"{own.efficiency:.0%}", own.efficiency) if own and own.efficiency is not None else none
            for own in found
        ],
        "step p50, ms": [_cell(run, "summary/step_ms_p50") for run in runs],
        "step p95, ms": [_cell(run, "summary/step_ms_p95") for run in runs],
        "training, s": [_cell(run, "summary/train_s") for run in runs],
        "status": [("" if run.status == "FINISHED" else run.status.lower(), None) for run in runs],
    }
    return {title: cells for title, cells in columns.items() if any(text for text, _ in cells)}


def _cell(run: RunFacts, metric: str) -> _Cell:
    spread = f" ±{run.spread[metric]:.2g}" if metric in run.spread else ""
    return _number(run.metrics.get(metric)) + spread, run.metrics.get(metric)


def _metric(run: RunFacts, metric: str, common: str) -> _Cell:
    """Return the cell of a final metric, with a mark if it was not measured on the `common` rows."""
    text, value = _cell(run, metric)
    return (text if run.measured == common or not text else f"{text}*", value)


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
        texts = [leaf if leaves.count(leaf) == 1 else name, *(printable(text) for text, _ in cells)]
        width = max(map(len, texts))
        is_left = all(value is None for _, value in cells)
        columns.append([text.ljust(width) if is_left else text.rjust(width) for text in texts])
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    facts, unequal = runs[0].params, _differing(runs)
    common = [name for name in _FIRST_PARAMS if name in facts and name not in unequal]
    notes = [f"the same in all: {', '.join(f'{n} {printable(facts[n])}' for n in common)}"] if common else []
    if "speed-up" in table:
        notes.append(f"speed-up: relative to the first value of {param}, other params equal except the seed")
    if "measured on" in table:
        notes.append(_OTHER_ROWS)
    for run in runs:
        total = sum(run.stages_ms.values())
        largest = sorted(run.stages_ms.items(), key=lambda item: -item[1])[:4]
        if total:
            shares = ", ".join(f"{stage} {ms / total:.0%}" for stage, ms in largest)
            notes.append(f"{printable(run.name)}: {_number(total)} ms a step: {shares}")
    return "\n".join([*lines, "", *notes]).rstrip()


def _as_number(value: str) -> float | None:
    try:
        return float(value)  # MLflow keeps params as texts
    except ValueError:
        return None


def _number(value: float | None) -> str:
    """Return a number with four significant digits, or ""."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def write_comparison(runs: Sequence[RunFacts], folder: Path, group_by: str) -> Path:
    """Write the comparison page into `folder`; return its path. Raises UserError for a param that no run
    has."""
    from plotly.offline import get_plotlyjs

    param = param_of(group_by, runs)
    runs = _ordered(runs, param)
    rows = [(run, [run]) for run in runs] if param == _SEED else _seeds_as_one(runs)
    replicas, splits = _split_table(runs)
    tables = [_table(rows, param)]
    if len(rows) < len(runs):
        tables.append(_table([(run, [run]) for run in runs], param))
    text = rendered(
        "page.html",
        title=f"{len(runs)} runs by {param}",
        made=datetime.now().strftime("%Y-%m-%d %H:%M"),
        tables=tables,
        differ=len(_differing(runs)) > 0,
        charts=_charts(rows, param),
        replicas=replicas,
        splits=splits,
        plotly=get_plotlyjs(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def _table(rows: _Rows, param: str) -> _Figure:
    """Return the table of runs for the template: titles, and for each row its colour, link, members and cells
    (text, whether it is a number, whether it is the best)."""
    runs = [run for run, _ in rows]
    columns = _overview(runs, param)
    finals = {name.removeprefix("final/") for run in runs for name in run.metrics if "final/" in name}
    common = _comparable(runs)
    best = {name: (min if least_is_best(name) else max) for name in finals} | _BEST_COLUMNS
    shown = []
    for title, cells in columns.items():
        known = [
            (value, text)
            for (text, value), run in zip(cells, runs, strict=True)
            if value is not None and not math.isnan(value) and (title not in finals or run.measured == common)
        ]
        # The best cells are found by their text: of numbers that look equal, all are the best.
        _, winner = best[title](known) if title in best and len(known) > 1 else (None, None)
        shown.append([(text, value is not None, text == winner) for text, value in cells])
    return {
        "note": f" {_OTHER_ROWS}." if "measured on" in columns else "",
        "titles": {title: any(value is not None for _, value in cells) for title, cells in columns.items()},
        "rows": [
            {
                "colour": colour,
                "url": run.url if run.url.startswith(("http://", "https://")) else "",
                "members": ", ".join(member.name for member in members),
                "cells": own,
            }
            for (run, members), colour, *own in zip(rows, _colours(runs, param), *shown, strict=True)
        ],
    }


def _charts(rows: _Rows, param: str) -> dict[str, tuple[str, str, _Figure]]:
    """Return the page's charts by id: title, note and figure."""
    runs = [run for run, _ in rows]
    virtual = _VIRTUAL if param == _DEVICES and any("*" in run.value(_DEVICES) for run in runs) else ""
    made = {
        "speed": (
            "Speed",
            f"Speed-up relative to the first value of {param}; other params are equal, except for the seed."
            + virtual,
            _speed(runs, param),
        ),
        "stages": ("Where a step's time goes", "Mean milliseconds of a step, by stage.", _stages(runs)),
        "curves": (
            "Metrics",
            "Click a name to hide its curves; double-click to see only them.",
            _curves(rows, param),
        ),
    }
    return {name: chart for name, chart in made.items() if chart[2]}


def _colours(runs: Sequence[RunFacts], param: str) -> list[str]:
    """Return a colour for each run: one for each value of `param`; if all have the same value, one for each
    run, so that their curves can be told apart."""
    values = list(dict.fromkeys(run.value(param) for run in runs))
    places = [values.index(run.value(param)) for run in runs] if len(values) > 1 else range(len(runs))
    return [_COLOURS[place % len(_COLOURS)] for place in places]


def _figure(data: list[_Figure], **layout: Any) -> _Figure:
    return {"data": data, "layout": _LAYOUT | layout} if data else {}


def _plain(text: object) -> str:
    """Return a text escaped for plotly, which interprets some HTML in names."""
    return html.escape(str(text), quote=False)


def _speed(runs: Sequence[RunFacts], param: str) -> _Figure:
    """Draw the speed-up against the values of `param`: a line for each combination of the other values."""
    speed = _speeds(runs, param)
    series: dict[str, list[RunFacts]] = {}
    for run in runs:
        if run.run_id in speed:
            series.setdefault(speed[run.run_id].among or "measured", []).append(run)
    if len({run.value(param) for members in series.values() for run in members}) < 2:
        return {}
    scaling = param == _DEVICES
    traces: list[_Figure] = [
        {
            "name": _plain(among),
            "x": [run.replicas if scaling else _plain(run.value(param)) for run in members],
            "y": [speed[run.run_id].ratio for run in members],
            "text": [f"{_plain(run.name)}<br>{run.samples_per_s:,.0f} samples/s" for run in members],
            "hovertemplate": "%{text}<br>speed-up %{y:.2f}<extra></extra>",
            "mode": "lines+markers" if scaling else "markers",
            "marker": {"size": 10, "color": _COLOURS[place % len(_COLOURS)]},
        }
        for place, (among, members) in enumerate(series.items())
    ]
    axis: _Figure = {"title": {"text": _plain(param)}, "type": "category"}
    if scaling:
        counts = sorted({count for trace in traces for count in trace["x"]})
        ideal = {"name": "ideal", "x": counts, "y": [count / counts[0] for count in counts], "mode": "lines"}
        traces.append(ideal | {"line": {"dash": "dash", "color": "#999"}, "hoverinfo": "skip"})
        axis = {"title": {"text": _DEVICES}, "tickvals": counts}
    y = {"title": {"text": "speed-up"}, "rangemode": "tozero"}
    return _figure(traces, xaxis=axis, yaxis=y, showlegend=True, legend={"orientation": "h", "y": -0.3})


def _stages(runs: Sequence[RunFacts]) -> _Figure:
    """Draw a stacked bar for each run, the largest stage first."""
    timed = [run for run in runs if run.stages_ms]
    totals: Any = Counter()
    for run in timed:
        totals.update(run.stages_ms)
    stages = [stage for stage, ms in totals.most_common() if ms > 0]
    names = [_plain(run.name[:36]) for run in timed]
    places = list(range(len(timed)))
    traces: list[_Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": _plain(stage),
            "marker": {"color": _COLOURS[number % len(_COLOURS)]},
            # Numbers, not names: plotly would stack two runs of one name into one bar.
            "y": places,
            "x": [run.stages_ms.get(stage, 0.0) for run in timed],
            "text": names,
            "textposition": "none",
            "hovertemplate": f"%{{text}}<br>{_plain(stage)}: %{{x:.3f}} ms<extra></extra>",
        }
        for number, stage in enumerate(stages)
    ]
    axis = {"tickvals": places, "ticktext": names, "automargin": True, "autorange": "reversed"}
    legend = {"orientation": "h", "traceorder": "normal", "y": -40 / (100 + 34 * len(timed))}
    return _figure(traces, barmode="stack", height=240 + 34 * len(timed), yaxis=axis, legend=legend)


def _curves(rows: _Rows, param: str) -> _Figure:
    """Draw a panel for each metric with a curve for each run, over steps or seconds."""
    names = sorted({name for _, members in rows for run in members for name in run.curves}, reverse=True)
    drawn = [
        (row, colour, number, points)
        for (row, members), colour in zip(rows, _colours([run for run, _ in rows], param), strict=True)
        for number, name in enumerate(names, start=1)
        for points in (run.curves[name] for run in members if run.curves.get(name))
    ]
    steps, seconds = ([[point[place] for point in points] for *_, points in drawn] for place in (0, 1))
    listed = [row.run_id for row, *_ in drawn]
    traces: list[_Figure] = [
        {
            "x": steps[place],
            "y": [point[2] for point in points],
            "xaxis": f"x{number}",
            "yaxis": f"y{number}",
            "name": _plain(row.name),
            "legendgroup": row.run_id,
            "showlegend": listed.index(row.run_id) == place,  # one entry for all curves of a row
            "line": {"color": colour, "width": 2},
            "mode": "lines+markers" if len(points) < 30 else "lines",
            "hovertemplate": f"{_plain(row.name)}<br>%{{x}}: %{{y:.5g}}<extra></extra>",
        }
        for place, (row, colour, number, points) in enumerate(drawn)
    ]
    columns, lines = min(2, len(names)), -(-len(names) // 2)
    # standoff: otherwise plotly writes a title over long tick labels
    titles = [{"text": _plain(name), "standoff": 8} for name in names]
    axes = {f"yaxis{n}": {"title": title, "automargin": True} for n, title in enumerate(titles, start=1)}
    types = {kind: {f"yaxis{n}.type": kind for n in range(1, len(names) + 1)} for kind in ("linear", "log")}
    menus = [
        _buttons(0.0, "restyle", {"over steps": {"x": steps}, "over seconds": {"x": seconds}}),
        _buttons(0.3, "relayout", {"linear": types["linear"], "logarithmic": types["log"]}),
    ]
    return _figure(
        traces,
        grid={"rows": lines, "columns": columns, "pattern": "independent", "xgap": 0.15, "ygap": 0.2},
        height=160 + 300 * lines,
        updatemenus=menus,
        legend={"orientation": "h", "y": -0.15 / max(1, lines)},
        margin=_LAYOUT["margin"] | {"t": 60},
        **axes,
    )


def _buttons(x: float, method: str, choices: dict[str, _Figure]) -> _Figure:
    buttons = [{"label": label, "method": method, "args": [values]} for label, values in choices.items()]
    place = {"x": x, "y": 1.0, "xanchor": "left", "yanchor": "bottom", "pad": {"b": 15}}
    return {"type": "buttons", "direction": "left", "showactive": True, "buttons": buttons} | place
