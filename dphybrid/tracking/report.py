"""The report of a run: in Markdown, as the description on its MLflow page, and in HTML, as an artifact; and
its figures, drawn by matplotlib as PNG bytes."""

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dphybrid.tracking.tracker import REPORT_PAGE
from dphybrid.util.text import as_flags, as_markdown, masked, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Page = Mapping[str, Any]
"""The fields of a JSON page."""
_MOST_LINES = 36
"""The most lines about the data in the Markdown report: MLflow limits a description to 8,000 characters."""


def run_report_markdown(report: Page) -> str:
    """Return the report in Markdown: result, baselines, split and largest stages first, then the data, all
    splits and times.

    report: the fields of `dphybrid.run.pages.Report`, and config, given (the flags of the command), tabular,
    data_name, data_source, data_lines and links (name -> address, such as the flow run's).
    """
    config = report["config"]
    results = ", ".join(f"{as_markdown(name)} **{value:.4f}**" for name, value in report["metrics"].items())
    where = f"batch {config['train']['batch_size']}, seed {config['train']['seed']}"
    first = [f"**{config['recipe']}** on `{report['devices']}`, {where}: {results}"]
    first += [f"Baselines: {as_markdown(report['beside'])}"] if report["beside"] else []
    first += [f"{name}: {line}" for name, line in first_facts(report).items()]
    # In few lines: MLflow shows about four of a description until somebody clicks "Show more".
    parts = ["  \n".join(first)]
    parts.append(" · ".join(f"[{as_markdown(name)}]({address})" for name, address in report["links"].items()))
    parts += [f"> **Note:** {as_markdown(warning)}" for warning in report["warnings"]]
    parts += (
        [f"> **Not registered as** {as_markdown(report['not_registered'])}"]
        if report["not_registered"]
        else []
    )
    source, lines = as_markdown(report["data_source"]), report["data_lines"]
    shown = [line[:160] for line in lines[:_MOST_LINES]]
    if more := len(lines) - len(shown):
        shown.append(f"  ... {more} more lines in {REPORT_PAGE}")
    parts.append(
        f"### Data\n\n`{report['data_name']}` from {source}, digest `{report['digests']['data'][:16]}`\n\n"
        # Three backticks in a column's name would end the code block.
        "```\n" + printable("\n".join(shown).replace("```", "` ` `")) + "\n```"
    )
    parts.append(
        "### How batches were split\n\n" + _table(report["splits"], ("where", "split", "device", "steps"))
    )
    parts.append(_where_time_went(report))
    parts.append(_how_to_load(report))
    parts.append(
        f"### Reproduce\n\n```\n{_command(report)}\n```\n`config.json` has all values; the run's tags have "
        "the versions and the commit."
    )
    return "\n\n".join(part for part in parts if part)


def run_report_html(report: Page, pictures: Mapping[str, bytes]) -> str:
    """Return the report as a self-contained HTML page. report: as for `run_report_markdown`, and also history
    (of `ResultPage`) and charts (of `MetricsPage`). pictures: file name -> PNG."""
    page = rendered(
        "report.html",
        title=report["run_name"],
        report=report,
        config=report["config"],
        # Addresses may come from others, and `javascript:` in one would run on the page.
        links={name: to for name, to in report["links"].items() if to.startswith(("http://", "https://"))},
        curves=_curves(report["history"]),
        stages=_stages(report),
        first_facts=first_facts(report),
        pictures={
            name.rpartition("/")[2]: base64.b64encode(picture).decode() for name, picture in pictures.items()
        },
        command=_command(report),
    )
    return printable(page)


def rendered(name: str, **values: object) -> str:
    """Return the page that a template of this folder makes of `values`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name).render(values)


def _curves(history: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    """Return a curve for each metric with at least two values, as SVG points in the coordinates of
    `report.html`'s frame."""
    curves = []
    for name in history[0] if history else ():
        points = [(row["step"], row[name]) for row in history if isfinite(row.get(name, nan))]
        if name == "step" or len(points) < 2:
            continue
        steps, values = zip(*points, strict=True)
        low, high = min(values), max(values)
        places = zip(
            np.interp(steps, (steps[0], steps[-1]), (48, 332)),
            np.interp(values, (low, high), (150, 10)),
            strict=True,
        )
        facts = {"first": f"{steps[0]:.0f}", "last": f"{steps[-1]:.0f}", "low": low, "high": high}
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        curves.append({"name": name, "points": drawn, "end": values[-1], **facts})
    return curves


def _command(report: Page) -> str:
    return printable(masked(f"dphybrid train {as_flags(report['given'])}"))


def _stages(report: Page) -> list[tuple[str, float, float]]:
    """Return name, seconds and share of each stage that took more than half a percent of the time."""
    total = sum(report["stages"].values()) or 1.0
    found = [(name, seconds, seconds / total) for name, seconds in report["stages"].items()]
    return [stage for stage in found if stage[2] > 0.005]


def _where_time_went(report: Page) -> str:
    stages = [
        {"stage": name, "seconds": f"{seconds:.2f}", "share": f"{share:.0%}"}
        for name, seconds, share in _stages(report)
    ]
    step = report["step_ms"]
    a_step = ""
    if step:
        a_step = f"A step took {step['p50']:.2f} ms (median), {step['p95']:.2f} ms (p95) after the warm-up. "
    return f"### Where time went\n\n{a_step}`{REPORT_PAGE}` draws the shares.\n\n" + _table(
        stages, ("stage", "seconds", "share")
    )


def _how_to_load(report: Mapping[str, object]) -> str:
    name, best = report["registered_as"], report["best_checkpoint"]
    lines = [f"model = dphybrid.load_model({best!r})  # a torch module"]
    if name:
        lines.append(f'model = dphybrid.load_model("models:/{name}@challenger")  # or, from the registry')
    if report["tabular"]:
        lines.append(f"predictor = dphybrid.load({best!r})  # with its preprocessing, for new rows")
    return "### Load the best checkpoint\n\n```python\nimport dphybrid\n\n" + "\n".join(lines) + "\n```"


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


def _table(rows: Any, columns: tuple[str, ...]) -> str:
    if not rows:
        return "nothing recorded"
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in list(rows)[:24]]
    if len(rows) > 24:
        lines.append(f"\n{len(rows) - 24} more in `split_shapes.json`.")
    return "\n".join(lines)


def _panels(
    width: float, height: float, rows: int = 1, columns: int = 1, grid: bool = True
) -> "tuple[Figure, list[Axes]]":
    """Return a figure and its panels, row by row."""
    from matplotlib.figure import Figure

    # Not through pyplot, which keeps all figures in global state and may choose a backend with windows.
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        if grid:
            axes.grid(alpha=0.3)
    return figure, panels


def _png(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    stream = io.BytesIO()
    FigureCanvasAgg(figure).print_png(stream)  # not savefig, which draws twice: first only for the layout
    return stream.getvalue()


def _drawn(text: str) -> str:
    """Return a text escaped for matplotlib, which reads text between two dollar signs as a formula."""
    return text.replace("$", r"\$")


def rows_per_replica_figure(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the rows that each replica got, with a group of bars for each distinct split. rows: of the split
    table."""
    groups: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["number"], row["block"]), []).append(row)
    shown = list(groups.items())[:8]
    height = 1.2 + 0.9 * len(shown) + 0.12 * sum(len(g) for _, g in shown)
    figure, (axes,) = _panels(8, height, grid=False)
    place, ticks, labels = 0.0, [], []
    for number, (_, group) in enumerate(shown):
        for replica, row in enumerate(group):
            axes.barh(place, row["rows"], color=f"C{number}")
            axes.text(row["rows"], place, f" {row['rows']}", va="center", fontsize=8)
            ticks.append(place)
            labels.append(f"replica {replica} ({row['device']})")
            place += 1
        first = group[0]
        axes.text(
            1.0,
            place - len(group) / 2 - 0.5,
            f"batch of {first['batch_rows']}\n{first['steps']} steps",
            transform=axes.get_yaxis_transform(),
            fontsize=8,
            va="center",
        )
        place += 0.8
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("rows of the batch")
    axes.set_title("How batches were split", loc="left")
    return _png(figure)


def against_figure(
    title: str, xlabel: str, ylabel: str, points: Sequence[tuple[float, float]], zero: bool = False
) -> bytes:
    """Draw points (x, y) and the line x = y. zero: the line y = 0 instead."""
    figure, (axes,) = _panels(5, 4.5)
    ends = [min(map(min, points)), max(map(max, points))]
    if zero:
        axes.axhline(0.0, linestyle="--", color="#999999")
    else:
        axes.plot(ends, ends, linestyle="--", color="#999999")
    axes.scatter([x for x, _ in points], [y for _, y in points], s=14, color="C0")
    axes.set_title(_drawn("\n".join(textwrap.wrap(title, 60))), loc="left", fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return _png(figure)


def confusion_figure(title: str, classes: Sequence[str], counts: Sequence[Sequence[float]]) -> bytes:
    """Draw a confusion matrix in shares of each class: a row for each true class, a column for each predicted
    class, recall on the diagonal."""
    names = [textwrap.shorten(name, 16, placeholder="…") or "…" for name in map(printable, classes)]
    side = max(5.0, 1.6 + 0.42 * len(names))
    figure, (axes,) = _panels(side, side - 0.3, grid=False)
    totals = [sum(line) for line in counts]
    shares = [[n / (total or 1.0) for n in line] for line, total in zip(counts, totals, strict=True)]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for y, line in enumerate(shares):
        for x, share in enumerate(line):
            if share >= 0.005:
                colour = "white" if share > 0.6 else "#1d2733"
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(names)), list(map(_drawn, names)), rotation=45, ha="right", fontsize=9)
    rows = [f"{_drawn(name)} ({total:,.6g})" for name, total in zip(names, totals, strict=True)]
    axes.set_yticks(range(len(names)), rows, fontsize=9)
    axes.set_title(_drawn("\n".join(textwrap.wrap(title, 48))), loc="left", fontsize=10)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class (rows)")
    return _png(figure)
