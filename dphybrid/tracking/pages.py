"""Pages of sections - facts, tables, pictures, text - as one HTML file that needs no other file and no
network, and how they show numbers.

Pictures are SVG that matplotlib draws. A page with plotly inside takes 5 MB, which each run would keep, and
the frames of MLflow and of notebooks load no file that lies beside the page.
"""

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from dphybrid.util.text import printable

COLOURS = (
    *("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d"),
    *("#bab0ac", "#7f3c8d", "#11a579", "#3969ac", "#f2b701", "#e73f74", "#80ba5a", "#e68310", "#008695"),
)
GREY: Any = {"color": "#999999", "linestyle": "--", "linewidth": 1}
"""How a line of reference looks."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table. value: its number. curve: id of the curves in `colour` that its button hides."""

    text: str
    value: float | None = None
    best: bool = False
    link: str = ""
    title: str = ""
    colour: str = ""
    curve: str = ""


@dataclass(frozen=True)
class Table:
    """A table. folded: the words that unfold it; "" for one that is open."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: str = ""

    @property
    def has_numbers(self) -> list[bool]:
        """For each column, whether it has numbers."""
        return [any(row[place].value is not None for row in self.rows) for place in range(len(self.columns))]


@dataclass(frozen=True)
class Picture:
    """A picture. draw: draws on matplotlib's axes. x, y: titles of the axes. size: inches."""

    draw: Callable[[Any], object]
    title: str = ""
    x: str = ""
    y: str = ""
    size: tuple[float, float] = (5.0, 3.2)


@dataclass(frozen=True)
class Section:
    """A part of a page. big: name -> a number to show large. facts: name -> text."""

    title: str = ""
    note: str = ""
    big: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    text: str = ""


def number(value: float) -> str:
    """Return a number with four significant digits."""
    if float(value).is_integer() or 1000 <= abs(value) < math.inf:
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.6g}"
    return f"{value:.4g}"


def as_number(text: str) -> float | None:
    """Return a number that is written as text, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def shown(value: object) -> str:
    """Return a value for a table: long numbers shortened, also those that are stored as texts; `-` for
    nothing."""
    if value in (None, "", "None"):
        return "-"
    if isinstance(value, str):
        parsed = as_number(value)
        return value if parsed is None or len(value) < 8 else number(parsed)
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def cell(value: object) -> Cell:
    """Return the cell of a value."""
    parsed = as_number(value) if isinstance(value, str) else value
    return Cell(shown(value), float(parsed) if isinstance(parsed, int | float) else None)


def short(text: object, most: int = 58) -> str:
    """Return a text for a picture."""
    words = printable(str(text))
    return words if len(words) <= most else f"{words[: most - 1]}…"


def html_of(title: str, sections: Sequence[Section], width: str = "66rem") -> str:
    """Return the page. Sections without content are left out."""
    import jinja2

    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    filled = [s for s in sections if any((s.big, s.facts, s.pictures, s.tables, s.text, s.note))]
    page = environment.from_string(source)
    return printable(page.render(title=title, sections=filled, width=width, picture=picture))


def picture(shows: Picture) -> str:
    """Return a picture as SVG."""
    # Not through pyplot, which keeps all figures in global state and may choose a backend with windows.
    import matplotlib
    from matplotlib.figure import Figure

    look: Any = {"svg.fonttype": "none", "svg.hashsalt": "dphybrid", "text.parse_math": False}
    look |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.markersize": 3.5,
        "axes.axisbelow": True,
    }
    stream = io.StringIO()
    with matplotlib.rc_context(look), catch_warnings():
        # of letters that matplotlib's font lacks: the reader's browser has them
        simplefilter("ignore", UserWarning)
        drawn = Figure(figsize=shows.size, layout="constrained")
        axes = drawn.subplots()
        axes.grid(alpha=0.2)
        shows.draw(axes)
        axes.set(xlabel=short(shows.x), ylabel=short(shows.y))
        axes.set_title("\n".join(textwrap.wrap(printable(shows.title), 55)), loc="left", fontsize=10)
        drawn.savefig(stream, format="svg", metadata={"Date": None})
    return "<svg" + stream.getvalue().partition("<svg")[2]


def bars(shares: Sequence[tuple[str, Mapping[str, float]]], x: str) -> Picture:
    """Return a picture of stacked bars: for each name a bar of its parts; the legend has several parts."""
    parts = list(dict.fromkeys(part for _, values in shares for part in values))

    def draw(axes: Any) -> None:
        starts = [0.0] * len(shares)
        for place, part in enumerate(parts):
            widths = [values.get(part, 0.0) for _, values in shares]
            colour = COLOURS[place % len(COLOURS)]
            axes.barh(range(len(shares)), widths, left=starts, color=colour, label=short(part))
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(range(len(shares)), [short(name, 36) for name, _ in shares])
        axes.invert_yaxis()
        if len(parts) > 1:
            axes.figure.legend(fontsize=8, ncols=4, loc="outside lower left", frameon=False)

    return Picture(
        draw, x=x, size=(5.0 if len(parts) < 2 else 6.5, 1.0 + 0.3 * len(shares) + 0.1 * len(parts))
    )
