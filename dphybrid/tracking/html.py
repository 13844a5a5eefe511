"""Pages of texts and figures as one HTML file that needs no other file and no network.

Figures are SVG that matplotlib draws. A page with plotly inside takes 5 MB, which each run would keep, and
the frames of MLflow and of notebooks load no file that lies beside the page.
"""

import html
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from warnings import catch_warnings, simplefilter

from dphybrid.util.text import printable

_COLOUR = "#4c78a8"
REFERENCE: Mapping[str, Any] = {"color": "#999999", "linestyle": "--", "linewidth": 1, "marker": ""}
"""How a line of reference looks."""
Line = tuple[Sequence[Any], Sequence[float], Mapping[str, Any]]
"""A line of a figure: xs, ys, matplotlib's options."""


_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #1d2733; margin: 0 auto; max-width: 66rem;
    padding: 1rem; }
  h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; border-bottom: 1px solid #d8dee6; }
  pre { background: #f4f6f8; padding: .6rem; overflow-x: auto; } pre:empty { display: none; }
  table { border-collapse: collapse; } th { vertical-align: bottom; } td + td, th + th { text-align: right; }
  th, td { text-align: left; padding: .1rem .5rem; border-bottom: 1px solid #d8dee6; }
  svg { max-width: 100%; height: auto; margin-right: 1.5rem; }
  @media (max-width: 45rem) { pre, table { font-size: .75rem; } pre:first-of-type { white-space: pre-wrap; }
    th, td { padding: .1rem .15rem; } svg { margin: 0; } }
</style>"""


def number(value: float) -> str:
    """Return a number with four significant digits."""
    if float(value).is_integer() or 1000 <= abs(value) < math.inf:
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.6g}"
    return f"{value:.4g}"


def html_of(title: str, texts: Mapping[str, str], figures: Mapping[str, Sequence[str]]) -> str:
    """Return the page: the first text, the figures (SVG) by title, and the other texts by title."""
    parts = []
    for name in dict.fromkeys([*list(texts)[:1], *figures, *texts]):
        text, drawn = texts.get(name, ""), "".join(figures.get(name, ()))
        if text or drawn:
            parts.append(f"<h2>{html.escape(name)}</h2>\n<pre>{html.escape(text)}</pre>\n<div>{drawn}</div>")
    return printable(
        f"{_HEAD}\n<title>{html.escape(title)}</title>\n<h1>{html.escape(title)}</h1>\n" + "\n".join(parts)
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts as a table. The first one is its head, in which names may break at underscores."""
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = ["".join(f"<th>{name.replace('_', '_<wbr>')}</th>" for name in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in body]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def lines(shown: Sequence[Line], title: str = "", x: str = "", y: str = "") -> str:
    """Draw lines, with a mark on each point where they are few."""

    def draw(axes: Any) -> None:
        for xs, ys, look in shown:
            axes.plot(xs, ys, **{"marker": "o" if len(xs) < 30 else "", "color": _COLOUR, **look})

    return figure(draw, title, x, y) if shown else ""


def bars(values: Mapping[str, float], x: str) -> str:
    """Draw a bar for each name."""

    def draw(axes: Any) -> None:
        axes.barh(range(len(values)), list(values.values()), color=_COLOUR)
        axes.set_yticks(range(len(values)), [_short(name, 36) for name in values])
        axes.invert_yaxis()

    return figure(draw, x=x, size=(5.0, 1.0 + 0.3 * len(values))) if values else ""


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
