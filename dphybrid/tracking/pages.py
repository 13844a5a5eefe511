"""Pages of sections - facts, tables, figures, text - as HTML and as Markdown, and how they show numbers.

Figures are plotly's, as dictionaries. A page that people click through has plotly inside; a report, which
each run keeps, has pictures that matplotlib draws of the same figures, as plotly takes 5 MB.
"""

import html
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from dphybrid.util.text import as_markdown, printable

Figure = dict[str, Any]
COLOURS = (
    *("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d"),
    *("#bab0ac", "#7f3c8d", "#11a579", "#3969ac", "#f2b701", "#e73f74", "#80ba5a", "#e68310", "#008695"),
)


@dataclass(frozen=True)
class Cell:
    """A cell of a table. value: its number, by which a column is sorted."""

    text: str
    value: float | None = None
    best: bool = False
    link: str = ""
    title: str = ""
    colour: str = ""


@dataclass(frozen=True)
class Table:
    """A table. rows: cells, or values to show. folded: the words that unfold it; "" for one that is open."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    folded: str = ""

    @property
    def are_numbers(self) -> list[bool]:
        """For each column, whether it has numbers."""
        columns = zip(*self.cells(), strict=True)
        return [any(cell.value is not None for cell in cells) for cells in columns]

    def cells(self) -> list[list[Cell]]:
        return [[value if isinstance(value, Cell) else cell(value) for value in row] for row in self.rows]


@dataclass(frozen=True)
class Section:
    """A part of a page. lead: its first sentence. big: name -> a number to show large. facts: name -> text.
    wide: whether a figure takes the whole width. brief: whether Markdown has it, too."""

    title: str = ""
    note: str = ""
    lead: str = ""
    big: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    text: str = ""
    warnings: Sequence[str] = ()
    wide: bool = False
    brief: bool = True


def number(value: float) -> str:
    """Return a number with four significant digits."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.0f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"


def shown(value: object) -> str:
    """Return a value for a table: long numbers shortened, also those that are stored as texts; `-` for
    nothing."""
    if value in (None, "", "None", "not set"):
        return "-"
    if isinstance(value, str):
        parsed = as_number(value)
        return value if parsed is None or len(value) < 8 else number(parsed)
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def cell(value: object) -> Cell:
    """Return the cell of a value."""
    parsed = as_number(value) if isinstance(value, str) else value
    return Cell(shown(value), float(parsed) if isinstance(parsed, int | float) else None)


def as_number(text: str) -> float | None:
    """Return a number that is written as text, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def html_of(title: str, sections: Sequence[Section], *, clickable: bool, width: str = "60rem") -> str:
    """Return a self-contained page. clickable: with plotly inside."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    plotly = ""
    if clickable:
        from plotly.offline import get_plotlyjs

        plotly = get_plotlyjs()
    shown = [part for part in sections if any((part.lead, part.facts, part.tables, part.figures, part.text))]
    values = {"title": title, "sections": shown, "width": width, "picture": picture, "escaped": _escaped}
    # Only what the template makes of values is cleaned, not plotly's own code.
    page = printable(environment.get_template("page.html").render(values, clickable=clickable))
    return page.replace("<!-- plotly -->", f"<script>{plotly}</script>" if plotly else "")


def markdown_of(sections: Sequence[Section]) -> str:
    """Return the brief sections of a page as Markdown."""
    parts = []
    for section in sections:
        if not section.brief:
            continue
        parts += [f"### {section.title}"] if section.title else []
        # In few lines: MLflow shows about four of a description until somebody clicks "Show more".
        values = ", ".join(f"{as_markdown(name)} **{text}**" for name, text in section.big.items())
        lines = [": ".join(filter(None, (as_markdown(section.lead), values)))]
        lines += [f"{as_markdown(name)}: {_linked(text)}" for name, text in section.facts.items()]
        parts += ["  \n".join(filter(None, lines))]
        parts += [as_markdown(section.note)] if section.note else []
        parts += [f"> **Note:** {as_markdown(warning)}" for warning in section.warnings]
        parts += [_markdown_table(table) for table in section.tables if not table.folded]
        # Three backticks in a column's name would end the code block.
        parts += [f"```\n{printable(section.text.replace('```', '` ` `'))}\n```"] if section.text else []
    return "\n\n".join(filter(None, parts))


def _linked(text: str) -> str:
    return f"<{text}>" if text.startswith(("http://", "https://")) else as_markdown(text)


def _markdown_table(table: Table) -> str:
    rows = table.cells()
    lines = [" | ".join(map(as_markdown, table.columns)), " | ".join(["---"] * len(table.columns))]
    lines += [" | ".join(as_markdown(cell.text) for cell in row) for row in rows[:24]]
    more = f"\n\n{len(rows) - 24} more rows in the report." if len(rows) > 24 else ""
    return "\n".join(f"| {line} |" for line in lines) + more


def picture(figure: Figure) -> str:
    """Return a figure as an SVG picture. Knows lines, points, bars and heat maps."""
    # Not through pyplot, which keeps all figures in global state and may choose a backend with windows.
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    layout, traces = figure["layout"], figure["data"]
    heat = traces[0].get("type") == "heatmap"
    sideways = traces[0].get("orientation") == "h"
    rows = len(traces[0]["y"]) if sideways or heat else 0
    height = max(3.2, 1.6 + 0.4 * rows) if heat else 1.0 + 0.3 * rows if rows else 3.2
    drawn = Canvas(figsize=(max(5.0, height) if heat else 5.0, height), layout="constrained")
    axes = drawn.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    starts = [0.0] * rows
    for place, trace in enumerate(traces):
        colour = trace.get("line", trace.get("marker", {})).get("color", COLOURS[place % len(COLOURS)])
        if heat:
            axes.imshow(trace["z"], cmap="Blues", vmin=0, vmax=1)
            for y, line in enumerate(trace["text"]):
                for x, words in enumerate(line):
                    dark = trace["z"][y][x] > 0.6
                    axes.text(x, y, words, ha="center", va="center", color="white" if dark else "#1d2733")
            axes.set_xticks(
                range(len(trace["x"])), [_literal(x) for x in trace["x"]], rotation=45, ha="right"
            )
            axes.set_yticks(range(rows), [_literal(y) for y in trace["y"]])
        elif sideways:
            axes.barh(range(rows), trace["x"], left=starts, color=colour, label=_literal(trace["name"]))
            starts = [a + b for a, b in zip(starts, trace["x"], strict=True)]
            axes.set_yticks(range(rows), [_literal(y) for y in trace["y"]])
        else:
            look: Figure = {"linestyle": "--" if trace.get("line", {}).get("dash") else "-", "linewidth": 1.6}
            if "lines" not in trace["mode"]:
                look = {"linestyle": "none"}
            marker = "o" if "markers" in trace["mode"] else None
            axes.plot(trace["x"], trace["y"], color=colour, marker=marker, markersize=3.5, **look)
            axes.grid(alpha=0.3)
    if sideways:
        axes.invert_yaxis()
        if len(traces) > 1:
            axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    for side, name in (("x", "xaxis"), ("y", "yaxis")):
        getattr(axes, f"set_{side}label")(_literal(layout.get(name, {}).get("title", {}).get("text", "")))
    title = "\n".join(textwrap.wrap(_literal(layout.get("title", {}).get("text", "")), 40 if heat else 60))
    axes.set_title(title, loc="left", fontsize=10)
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dphybrid"}), catch_warnings():
        # of letters that matplotlib's font lacks: the reader's browser has them
        simplefilter("ignore", UserWarning)
        drawn.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue().partition("<svg")[1] + stream.getvalue().partition("<svg")[2]


def _escaped(value: Any) -> Any:
    """Return a part of a figure with its texts escaped: plotly interprets some HTML in them."""
    if isinstance(value, dict):
        return {k: v if k in ("hovertemplate", "texttemplate") else _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return html.escape(value, quote=False) if isinstance(value, str) else value


def _literal(text: object) -> str:
    """Return a text for matplotlib, which reads text between two dollar signs as a formula."""
    words = printable(str(text))
    return (words if len(words) < 60 else f"{words[:58]}…").replace("$", r"\$")


def figure(data: list[Figure], title: str = "", x: str = "", y: str = "", **layout: Any) -> Figure:
    """Return a figure of traces. x, y: titles of its axes."""
    return {
        "data": data,
        "layout": {
            "title": {"text": title, "font": {"size": 14}},
            "margin": {"l": 60, "r": 15, "t": 40, "b": 50},
            "font": {"size": 13},
            "hovermode": "closest",
            "showlegend": False,
            "xaxis": {"title": {"text": x}},
            "yaxis": {"title": {"text": y}, "automargin": True},
        }
        | layout,
    }


def line(points: Sequence[tuple[Any, float]], name: str = "", mode: str = "lines", **look: Any) -> Figure:
    """Return a trace through points."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    return {"x": list(xs), "y": list(ys), "name": name, "mode": mode, **look}


DIAGONAL = line([(0.0, 0.0), (1.0, 1.0)], line={"dash": "dash", "color": "#999999"}, hoverinfo="skip")
