"""Pages of sections - facts, tables, figures, text - as one HTML file that needs no other file and no
network.

Figures are SVG that matplotlib draws. A page with plotly inside takes 5 MB, which each run would keep, and
the frames of MLflow and of notebooks load no file that lies beside the page.
"""

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

from dphybrid.util.text import printable

COLOURS = (
    *("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d"),
    *("#bab0ac", "#7f3c8d", "#11a579", "#3969ac", "#f2b701", "#e73f74", "#80ba5a", "#e68310", "#008695"),
)
REFERENCE: Mapping[str, Any] = {"color": "#999999", "linestyle": "--", "linewidth": 1, "marker": ""}
"""How a line of reference looks."""
Line = tuple[Sequence[Any], Sequence[float], Mapping[str, Any]]
"""A line of a figure: xs, ys, matplotlib's options."""


class Cell(NamedTuple):
    """A cell of a table. number: its value; None for words."""

    text: str
    number: float | None = None


@dataclass(frozen=True)
class Table:
    """A table: title -> a value or `Cell` for each row."""

    columns: Mapping[str, Sequence[object]]

    @property
    def rows(self) -> list[list[tuple[Cell, bool]]]:
        """The rows: for each column its cell, and whether the column has numbers."""
        columns = [
            [v if isinstance(v, Cell) else cell(v) for v in column] for column in self.columns.values()
        ]
        aligned = [any(each.number is not None for each in cells) for cells in columns]
        return [list(zip(row, aligned, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Section:
    """A part of a page. big: name -> a number to show large. facts: name -> text. figures: SVG."""

    title: str = ""
    note: str = ""
    big: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    figures: Sequence[str] = ()
    tables: Sequence[Table] = ()
    text: str = ""


def number(value: float) -> str:
    """Return a number with four significant digits."""
    if float(value).is_integer() or 1000 <= abs(value) < math.inf:
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.6g}"
    return f"{value:.4g}"


def cell(value: object) -> Cell:
    """Return the cell of a value: long numbers shortened, also those that are stored as texts; `-` for
    nothing."""
    if value in (None, "", "None"):
        return Cell("-")
    try:
        parsed = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return Cell(str(value))
    return Cell(value if isinstance(value, str) and len(value) < 8 else number(parsed), parsed)


def html_of(title: str, sections: Sequence[Section]) -> str:
    """Return the page. Sections without content are left out, as are empty figures and tables."""
    import jinja2

    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    filled = [s for s in sections if s.big or s.text or any(s.figures) or any(t.rows for t in s.tables)]
    page = environment.from_string(source)
    return printable(page.render(title=title, sections=filled, number=number))


def lines(
    shown: Sequence[Line], title: str = "", x: str = "", y: str = "", ticks: Sequence[int] | None = None
) -> str:
    """Draw lines, with a mark on each point where they are few. Lines with labels are drawn from 0 on and
    have a legend. ticks: of the x axis."""

    def draw(axes: Any) -> None:
        for xs, ys, look in shown:
            axes.plot(xs, ys, **{"marker": "o" if len(xs) < 30 else "", "color": COLOURS[0], **look})
        if ticks:
            axes.set_xticks(ticks)
        if any("label" in look for _, _, look in shown):
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=8, frameon=False)

    return figure(draw, title, x, y) if shown else ""


def bars(shares: Sequence[tuple[str, Mapping[str, float]]], x: str) -> str:
    """Draw stacked bars: for each name a bar of its parts; several parts have a legend."""
    parts = list(dict.fromkeys(part for _, values in shares for part in values))

    def draw(axes: Any) -> None:
        starts = [0.0] * len(shares)
        for place, part in enumerate(parts):
            widths = [values.get(part, 0.0) for _, values in shares]
            colour = COLOURS[place % len(COLOURS)]
            axes.barh(range(len(shares)), widths, left=starts, color=colour, label=_short(part, 58))
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(range(len(shares)), [_short(name, 36) for name, _ in shares])
        axes.invert_yaxis()
        if len(parts) > 1:
            axes.figure.legend(fontsize=8, ncols=4, loc="outside lower left", frameon=False)

    size = (5.0 if len(parts) < 2 else 6.5, 1.0 + 0.3 * len(shares) + 0.1 * len(parts))
    return figure(draw, x=x, size=size) if shares else ""


def matrix(title: str, names: Sequence[str], counts: Sequence[Sequence[float]]) -> str:
    """Draw a confusion matrix as shares of each true class, which is a line of it."""
    names = [_short(name, 16) for name in names]

    def draw(axes: Any) -> None:
        axes.grid(visible=False)
        shares = [[count / (sum(line) or 1.0) for count in line] for line in counts]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for y, line in enumerate(shares):
            for x, share in enumerate(line):
                if share >= 0.005:
                    colour = "white" if share > 0.6 else "black"
                    axes.text(x, y, f"{share:.0%}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        totals = [f"{name} ({sum(line):,.6g})" for name, line in zip(names, counts, strict=True)]
        axes.set_yticks(range(len(names)), totals)

    size = max(3.2, 1.6 + 0.4 * len(names))
    return figure(draw, title, "predicted class", "true class", (size + 2, size))


def figure(
    draw: Callable[[Any], None],
    title: str = "",
    x: str = "",
    y: str = "",
    size: tuple[float, float] = (5.0, 3.2),
) -> str:
    """Return what `draw` draws on matplotlib's axes as SVG. x, y: titles of the axes. size: inches."""
    # Not through pyplot, which keeps all figures in global state and may choose a backend with windows.
    import matplotlib
    from matplotlib.figure import Figure

    look: Any = {"svg.fonttype": "none", "svg.hashsalt": "dphybrid", "text.parse_math": False}
    look |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    stream = io.StringIO()
    with matplotlib.rc_context({**look, "lines.markersize": 3.5}), catch_warnings():
        # of letters that matplotlib's font lacks: the reader's browser has them
        simplefilter("ignore", UserWarning)
        drawn = Figure(figsize=size, layout="constrained")
        axes = drawn.subplots()
        axes.grid(alpha=0.2)
        draw(axes)
        axes.set(xlabel=_short(x, 58), ylabel=_short(y, 58))
        axes.set_title("\n".join(textwrap.wrap(printable(title), 55)), loc="left", fontsize=10)
        drawn.savefig(stream, format="svg", metadata={"Date": None})
    return "<svg" + stream.getvalue().partition("<svg")[2]


def _short(text: str, most: int) -> str:
    words = printable(text)
    return words if len(words) <= most else f"{words[: most - 1]}…"
