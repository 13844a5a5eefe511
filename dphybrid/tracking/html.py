"""Pages of texts and figures as one HTML file that needs no other file and no network.

Figures are SVG, written here: a library that draws takes longer to import than a small model to train, and
the frames of MLflow and of notebooks load no file that lies beside the page.
"""

import html
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from dphybrid.util.text import printable

Look = Literal["line", "points", "reference", "kept"]
"""How a line of a figure looks. reference: dashed and grey; kept: a red ring."""
Line = tuple[Sequence[float], Sequence[float], Look]
"""A line of a figure: xs, ys, its look."""
_WIDTH, _HEIGHT = 400, 220
"""Pixels between the ends of the axes."""
_LETTER = 6.5
"""Pixels of a letter's width."""
_MOST = 1e100
"""The largest number that is drawn."""
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #1d2733; margin: 0 auto; max-width: 66rem;
    padding: 1rem; }
  h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; border-bottom: 1px solid #d8dee6; }
  pre { background: #f4f6f8; padding: .6rem; overflow-x: auto; } pre:empty { display: none; }
  svg { max-width: 100%; height: auto; margin-right: 1.5rem; font-size: 11px; overflow: visible; }
  @media (max-width: 45rem) { pre { font-size: .75rem; } svg { margin: 0; }
    pre:first-of-type { white-space: pre-wrap; overflow-wrap: anywhere; } }
  svg .title { font-size: 13px; } .middle { text-anchor: middle; } .end { text-anchor: end; }
  .grid { stroke: #e4e8ed; } .axis { stroke: #1d2733; } .mark { fill: #4c78a8; }
  polyline { fill: none; stroke: #4c78a8; stroke-width: 1.5; }
  polyline.reference { stroke: #999999; stroke-width: 1; stroke-dasharray: 5 3; }
  .kept { fill: none; stroke: #e45756; stroke-width: 1.5; }
</style>"""


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


def lines(shown: Sequence[Line], title: str = "", x: str = "", y: str = "") -> str:
    """Draw lines, without the points that cannot be drawn: nan, inf, or beyond 1e100."""
    drawn = [
        ([(a, b) for a, b in zip(xs, ys, strict=True) if abs(a) < _MOST and abs(b) < _MOST], look)
        for xs, ys, look in shown
    ]
    if not any(points for points, _ in drawn):
        return ""
    across = _Scale([a for points, _ in drawn for a, _ in points], _WIDTH)
    up = _Scale([b for points, _ in drawn for _, b in points], _HEIGHT)
    parts = []
    for offset, text in across.ticks():
        parts.append(f'<path class="grid" d="M{offset:.1f} 0v{_HEIGHT}"/>')
        parts.append(_text(offset, _HEIGHT + 15, text, "middle"))
    parts.append(_text(_WIDTH / 2, _HEIGHT + 33, _short(x, 58), "middle"))
    for offset, text in up.ticks():
        parts.append(f'<path class="grid" d="M0 {_HEIGHT - offset:.1f}h{_WIDTH}"/>')
        parts.append(_text(-6, _HEIGHT - offset + 4, text, "end"))
    parts.append(f'<path class="axis" d="M0 0v{_HEIGHT}h{_WIDTH}" fill="none"/>')
    left = 14 + _LETTER * max((len(text) for _, text in up.ticks()), default=0)
    turned = f' transform="rotate(-90 {-left - 4:.1f} {_HEIGHT / 2})"'
    parts.append(_text(-left - 4, _HEIGHT / 2, _short(y, 40), "middle", turned))
    for points, look in drawn:
        at = [(across.at(a), _HEIGHT - up.at(b)) for a, b in points]
        if look in ("line", "reference"):
            style = ' class="reference"' if look == "reference" else ""
            parts.append(f'<polyline{style} points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in at)}"/>')
        if look in ("points", "kept"):
            mark = 'class="kept" r="5"' if look == "kept" else 'class="mark" r="2.5"'
            parts += [f'<circle {mark} cx="{a:.1f}" cy="{b:.1f}"/>' for a, b in at]
    words, left = textwrap.wrap(printable(title), 60), left + (20 if y else 0)
    above = 10 + 17 * len(words)
    titles = [_text(-left, 17 * row + 12 - above, line, "title") for row, line in enumerate(words)]
    wide, high = left + _WIDTH + 20, above + _HEIGHT + 40
    box = f'width="{wide:.0f}" height="{high:.0f}" viewBox="{-left:.1f} {-above:.1f} {wide:.1f} {high:.1f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join([*titles, *parts])}</svg>'


class _Scale:
    """Maps values to pixels from 0 to `size`, with round numbers at its ticks."""

    def __init__(self, values: Sequence[float], size: float) -> None:
        low, high = float(min(values)), float(max(values))
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, or several that look like one
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        rough = max((high - low) / 5, 1 / _MOST)
        base = 10.0 ** math.floor(math.log10(rough))
        self._step = next(base * times for times in (1, 2, 5, 10) if base * times >= rough)
        self._low, self._high = low - 0.03 * (high - low), high + 0.03 * (high - low)
        self._size = size

    def at(self, value: float) -> float:
        return self._size * (value - self._low) / (self._high - self._low)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Return the position and the text of each tick."""
        digits = max(0, -math.floor(math.log10(self._step)))
        first, last = math.ceil(self._low / self._step), math.floor(self._high / self._step)
        for value in (number * self._step for number in range(first, last + 1)):
            plain = digits < 6 and abs(value) < 1e9
            yield self.at(value), f"{value:,.{digits}f}" if plain else f"{value:.3g}"


def _text(x: float, y: float, text: str, style: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}"{more}>{html.escape(text)}</text>' if text else ""


def _short(text: str, most: int) -> str:
    words = printable(text)
    return words if len(words) <= most else f"{words[: most - 1]}…"
