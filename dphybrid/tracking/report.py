"""The report of a run: the sections of its page, which is also the description of the run in MLflow."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from dphybrid.tracking.pages import (
    COLOURS,
    Cell,
    Figure,
    Section,
    Table,
    figure,
    html_of,
    line,
    markdown_of,
    number,
)
from dphybrid.tracking.tracker import REPORT_PAGE
from dphybrid.util.text import as_flags, masked, printable

Page = Mapping[str, Any]
"""The fields of a JSON page."""

_MOST_LINES = 36
"""The most lines about the data in the Markdown report: MLflow limits a description to 8,000 characters."""


def run_report_html(report: Page, clickable: bool = False) -> str:
    """Return the report as a self-contained HTML page. clickable: with plotly inside, 5 MB.

    report: the fields of `dphybrid.run.pages.Report`, and config, given (the flags of the command), tabular,
    data_name, data_source, data_lines, links (name -> address, such as the flow run's), history (of
    `ResultPage`) and charts (of `MetricsPage`)."""
    return html_of(str(report["run_name"]), _sections(report, len(report["data_lines"])), clickable=clickable)


def run_report_markdown(report: Page) -> str:
    """Return the report in Markdown, without figures. report: as for `run_report_html`."""
    return markdown_of(_sections(report, _MOST_LINES))


def _sections(report: Page, most_lines: int) -> list[Section]:
    config, step = report["config"], report["step_ms"]
    where = f"{config['recipe']} on {report['devices']}, batch {config['train']['batch_size']}, seed "
    big = {name: f"{value:.4f}" for name, value in report["metrics"].items()}
    facts = {"Baselines": report["beside"]} if report["beside"] else {}
    # Addresses may come from others, and `javascript:` in one would run on the page.
    links = {name: to for name, to in report["links"].items() if to.startswith(("http://", "https://"))}
    warnings = list(report["warnings"])
    warnings += [f"Not registered as {report['not_registered']}"] if report["not_registered"] else []
    median = f"A step took {number(step['p50'])} ms (median), {number(step['p95'])} ms (p95)." if step else ""
    stages = _stages(report)
    lines = [text[:160] for text in report["data_lines"][:most_lines]]
    more = len(report["data_lines"]) - len(lines)
    lines += [f"  ... {more} more lines in {REPORT_PAGE}"] if more > 0 else []
    digest = report["digests"]["data"][:16]
    splits = [[row[name] for name in ("where", "split", "device", "steps")] for row in report["splits"]]
    return [
        Section(
            lead=f"{where}{config['train']['seed']}",
            big=big | ({"ms a step": number(step["p50"])} if step else {}),
            facts=facts | first_facts(report) | links,
            warnings=warnings,
        ),
        Section("How it learned", figures=_curves(report["history"]), brief=False),
        Section(
            "What it predicts",
            figures=[chart_figure(chart) for chart in report["charts"]],
            tables=[_recall(chart) for chart in report["charts"] if "recall" in chart],
            brief=False,
        ),
        Section(
            "How batches were split",
            "" if splits else "nothing recorded",
            figures=_shares(report["splits"]),
            tables=[Table(("where", "split", "device", "steps"), splits)] if splits else [],
        ),
        Section(
            "Where time went",
            median,
            figures=[_stage_bars(stages)] if stages else [],
            tables=[Table(("stage", "seconds", "share"), _stage_rows(stages))],
        ),
        Section(
            "Data",
            f"{report['data_name']} from {report['data_source']}, digest {digest}",
            text="\n".join(lines),
        ),
        Section("Load the best checkpoint", text=_how_to_load(report)),
        Section(
            "Reproduce",
            "config.json has all values; the run's tags have the versions and the commit.",
            text=printable(masked(f"dphybrid train {as_flags(report['given'])}")),
        ),
    ]


def first_facts(report: Page) -> dict[str, str]:
    """Return the two lines below a run's result, by name: the split of a batch, the largest stages."""
    facts = {}
    full = [row for row in report["splits"] if row["number"] == 1]  # of the first batch, which is full
    rows = [row["rows"] for row in full if row["block"] == full[0]["block"]]
    if len(rows) > 1:
        shown = " + ".join(map(str, rows[:8])) + (" + ..." if len(rows) > 8 else "")
        facts["Split"] = f"{full[0]['batch_rows']} rows on {len(rows)} devices: {shown}"
    if stages := sorted(_stages(report), key=lambda stage: -stage[1])[:3]:
        step = f"; {report['step_ms']['p50']:.3g} ms a step (median)" if report["step_ms"] else ""
        facts["Time"] = ", ".join(f"{name} {share:.0%}" for name, _, share in stages) + step
    return facts


def chart_figure(chart: Page) -> Figure:
    """Return the figure of a chart of predictions (`dphybrid.training.metrics.Chart` or `Confusion`)."""
    title = chart["title"]
    if "counts" in chart:
        totals = [sum(counts) for counts in chart["counts"]]
        shares = [
            [n / (total or 1.0) for n in row] for row, total in zip(chart["counts"], totals, strict=True)
        ]
        names = [name if len(name) <= 16 else f"{name[:15]}…" for name in map(printable, chart["classes"])]
        rows = [f"{name} ({total:,.6g})" for name, total in zip(names, totals, strict=True)]
        heat: Figure = {"type": "heatmap", "z": shares, "x": names, "y": rows, "colorscale": "Blues"}
        heat |= {"zmin": 0, "zmax": 1, "showscale": False, "texttemplate": "%{text}"}
        heat["text"] = [[f"{share:.0%}" if share >= 0.005 else "" for share in row] for row in shares]
        axis = {"title": {"text": "true class (rows)"}, "autorange": "reversed", "automargin": True}
        return figure([heat], title, "predicted class", height=200 + 34 * len(names), yaxis=axis)
    points = [(x, y) for x, y in chart["points"]]
    ends = [min(min(p) for p in points), max(max(p) for p in points)] if points else [0.0, 1.0]
    grey: Figure = {"line": {"dash": "dash", "color": "#999999"}, "hoverinfo": "skip"}
    traces = []
    if chart["line"] == "equal":
        traces.append(line([(ends[0], ends[0]), (ends[1], ends[1])], **grey))
    if chart["line"] == "zero":
        traces.append(line([(min(x for x, _ in points), 0.0), (max(x for x, _ in points), 0.0)], **grey))
    mode = "lines" if chart.get("drawn") == "line" else "markers"
    traces.append(line(points, mode=mode, marker={"color": COLOURS[0]}, line={"color": COLOURS[0]}))
    return figure(traces, title, chart["xlabel"], chart["ylabel"])


def _recall(chart: Page) -> Table:
    rows = [
        (name, sum(counts), None if recall is None else 100 * recall)
        for name, counts, recall in zip(chart["classes"], chart["counts"], chart["recall"], strict=True)
    ]
    return Table(("class", "validation rows", "recall, %"), rows)


def _curves(history: Sequence[Mapping[str, float]]) -> list[Figure]:
    """Return a figure for each metric with at least two values."""
    figures = []
    for name in history[0] if history else ():
        points = [(row["step"], row[name]) for row in history if isfinite(row.get(name, nan))]
        if name != "step" and len(points) > 1:
            trace = line(
                points, mode="lines+markers" if len(points) < 30 else "lines", line={"color": COLOURS[0]}
            )
            figures.append(figure([trace], f"{name}: {number(points[-1][1])} at the end", "step"))
    return figures


def _stages(report: Page) -> list[tuple[str, float, float]]:
    """Return name, seconds and share of each stage that took more than half a percent of the time."""
    total = sum(report["stages"].values()) or 1.0
    found = [(name, seconds, seconds / total) for name, seconds in report["stages"].items()]
    return [stage for stage in found if stage[2] > 0.005]


def _stage_rows(stages: Sequence[tuple[str, float, float]]) -> list[list[str | Cell]]:
    return [[n, Cell(f"{s:.2f}", s), Cell(f"{share:.0%}", share)] for n, s, share in stages]


def _stage_bars(stages: Sequence[tuple[str, float, float]]) -> Figure:
    names, seconds, _ = zip(*stages, strict=True)
    return _bars(names, seconds, "seconds")


def _shares(splits: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return a figure of the rows that each replica got of the first batch, if there are several."""
    full = [row for row in splits if row["number"] == 1]
    full = [row for row in full if row["block"] == full[0]["block"]]
    names = [f"replica {row['replica']} ({row['device']})" for row in full]
    return [_bars(names, [row["rows"] for row in full], "rows of a full batch")] if len(full) > 1 else []


def _bars(names: Sequence[str], values: Sequence[float], x: str) -> Figure:
    bars: Figure = {"type": "bar", "orientation": "h", "name": "", "x": list(values), "y": list(names)}
    axis = {"autorange": "reversed", "automargin": True}
    height = 110 + 28 * len(names)
    return figure([bars | {"marker": {"color": COLOURS[0]}}], x=x, yaxis=axis, height=height)


def _how_to_load(report: Page) -> str:
    name, best = report["registered_as"], report["best_checkpoint"]
    lines = ["import dphybrid", "", f"model = dphybrid.load_model({best!r})  # a torch module"]
    if name:
        lines.append(f'model = dphybrid.load_model("models:/{name}@challenger")  # or, from the registry')
    if report["tabular"]:
        lines.append(f"predictor = dphybrid.load({best!r})  # with its preprocessing, for new rows")
    return "\n".join(lines)
