"""What the page of a comparison shows: a table, and charts as plotly's figures, each a dict of JSON.

A row is a run, or several that differ in their seed alone, beside its members.
"""

import html
from collections.abc import Sequence
from typing import Any

from plotly.colors import qualitative

from dphybrid.tracking.compare_facts import DEVICES, RunFacts, as_number, overview, speeds
from dphybrid.tracking.writer import least_is_best

Rows = Sequence[tuple[RunFacts, Sequence[RunFacts]]]
Figure = dict[str, Any]

_COLOURS = (*qualitative.T10, *qualitative.Bold)  # more of them than a step has stages
_LAYOUT: Figure = {
    "margin": {"l": 55, "r": 15, "t": 35, "b": 45},
    "font": {"size": 13},
    "hovermode": "closest",
    "legend": {"orientation": "h", "y": -0.25},
}
_BEST_COLUMNS = {"samples/s": max, "step p50, ms": min}
_VIRTUAL = " Virtual devices share their hardware: they show what splitting costs, not what more GPUs bring."


def table(rows: Rows, param: str) -> Figure:
    """Return the table of runs: its titles, and for each row its colour, link, members and cells (text, is it
    a number, is it the best)."""
    runs = [run for run, _ in rows]
    texts = overview(runs, param)
    finals = {name.removeprefix("final/") for run in runs for name in run.metrics if "final/" in name}
    best = {name: (min if least_is_best(name) else max) for name in finals} | _BEST_COLUMNS
    columns = {}
    for title in texts[0]:
        numbers = [as_number(row[title]) for row in texts]
        known = [value for value in numbers if value is not None]
        winner = best[title](known) if title in best and len(known) > 1 else None
        columns[title] = [
            (row[title], value is not None, value is not None and value == winner)
            for row, value in zip(texts, numbers, strict=True)
        ]
    cells = zip(*columns.values(), strict=True)
    return {
        "titles": {title: any(is_number for _, is_number, _ in made) for title, made in columns.items()},
        "rows": [
            {
                "colour": colour,
                "url": run.url if run.url.startswith(("http://", "https://")) else "",
                "members": ", ".join(member.name for member in members),
                "cells": own,
            }
            for (run, members), colour, own in zip(rows, _colours(runs, param), cells, strict=True)
        ],
    }


def charts(rows: Rows, param: str) -> dict[str, tuple[str, str, Figure]]:
    """Return the page's charts by id: title, note and figure."""
    runs = [run for run, _ in rows]
    virtual = _VIRTUAL if param == DEVICES and any("*" in run.value(DEVICES) for run in runs) else ""
    made = {
        "speed": (
            "Speed",
            f"Speed-up relative to the first value of {param}, for runs equal in all else but the seed."
            + virtual,
            _speed(runs, param),
        ),
        "stages": ("Where a step's time goes", "Mean milliseconds of a step, by stage.", _stages(runs)),
        "curves": (
            "Metrics",
            "Click a name to hide its curves, twice to see them alone.",
            _curves(rows, param),
        ),
    }
    return {name: chart for name, chart in made.items() if chart[2]}


def _colours(runs: Sequence[RunFacts], param: str) -> list[str]:
    """Return a colour for each run by its value of `param`; runs with equal values differ all the same, else
    no curve could be told from another."""
    values = list(dict.fromkeys(run.value(param) for run in runs))
    places = [values.index(run.value(param)) for run in runs] if len(values) > 1 else range(len(runs))
    return [_COLOURS[place % len(_COLOURS)] for place in places]


def _figure(data: list[Figure], **layout: Any) -> Figure:
    return {"data": data, "layout": _LAYOUT | layout} if data else {}


def _plain(text: object) -> str:
    """Return a text that plotly shows as it is: it reads a little HTML in names."""
    return html.escape(str(text), quote=False)


def _speed(runs: Sequence[RunFacts], param: str) -> Figure:
    """Draw the speed-up against the values of `param`: a line for each combination of the other values."""
    speed = speeds(runs, param)
    series: dict[str, list[RunFacts]] = {}
    for run in runs:
        if run.run_id in speed:
            series.setdefault(speed[run.run_id].among or "measured", []).append(run)
    if len({run.value(param) for members in series.values() for run in members}) < 2:
        return {}
    scaling = param == DEVICES
    traces: list[Figure] = [
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
    axis: Figure = {"title": {"text": _plain(param)}, "type": "category"}
    if scaling:
        counts = sorted({count for trace in traces for count in trace["x"]})
        ideal = {"name": "ideal", "x": counts, "y": [count / counts[0] for count in counts], "mode": "lines"}
        traces.append(ideal | {"line": {"dash": "dash", "color": "#999"}, "hoverinfo": "skip"})
        axis = {"title": {"text": DEVICES}, "tickvals": counts}
    y = {"title": {"text": "speed-up"}, "rangemode": "tozero"}
    return _figure(traces, xaxis=axis, yaxis=y, showlegend=True, legend={"orientation": "h", "y": -0.3})


def _stages(runs: Sequence[RunFacts]) -> Figure:
    """Draw a stacked bar a run, the largest stage first."""
    timed = [run for run in runs if run.stages_ms]
    totals = {stage: 0.0 for run in timed for stage in run.stages_ms}
    for run in timed:
        for stage, ms in run.stages_ms.items():
            totals[stage] += ms
    stages = sorted((stage for stage in totals if totals[stage] > 0), key=lambda stage: -totals[stage])
    names = [_plain(run.name[:36]) for run in timed]
    places = list(range(len(timed)))
    traces: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": _plain(stage),
            "marker": {"color": _COLOURS[number % len(_COLOURS)]},
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


def _curves(rows: Rows, param: str) -> Figure:
    """Draw a panel a metric and in it a curve a run, over steps or seconds."""
    names = sorted({name for _, members in rows for run in members for name in run.curves}, reverse=True)
    steps: list[list[float]] = []
    seconds: list[list[float]] = []
    traces: list[Figure] = []
    for (row, members), colour in zip(rows, _colours([run for run, _ in rows], param), strict=True):
        listed = False
        for number, name in enumerate(names, start=1):
            for points in (run.curves[name] for run in members if run.curves.get(name)):
                steps.append([point[0] for point in points])
                seconds.append([point[1] for point in points])
                label = _plain(row.name)
                traces.append(
                    {
                        "x": steps[-1],
                        "y": [point[2] for point in points],
                        "xaxis": f"x{number}",
                        "yaxis": f"y{number}",
                        "name": label,
                        "legendgroup": row.run_id,
                        "showlegend": not listed,
                        "line": {"color": colour, "width": 2},
                        "mode": "lines+markers" if len(points) < 30 else "lines",
                        "hovertemplate": f"{label}<br>%{{x}}: %{{y:.5g}}<extra></extra>",
                    }
                )
                listed = True
    columns, lines = min(2, len(names)), -(-len(names) // 2)
    axes = {f"yaxis{n}": {"title": {"text": _plain(name)}} for n, name in enumerate(names, start=1)}
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


def _buttons(x: float, method: str, choices: dict[str, Figure]) -> Figure:
    buttons = [{"label": label, "method": method, "args": [values]} for label, values in choices.items()]
    place = {"x": x, "y": 1.0, "xanchor": "left", "yanchor": "bottom", "pad": {"b": 15}}
    return {"type": "buttons", "direction": "left", "showactive": True, "buttons": buttons} | place
