"""Figures of reports: what is drawn, and where."""

import re
from math import inf, nan

import pytest

from dphybrid.tracking.html import Line, lines


def test_a_line_lies_within_its_axes_and_names_them() -> None:
    shown: list[Line] = [([0, 1], [0, 1], "reference"), ([0, 0.5, 1], [0, 0.25, 1], "line")]
    drawn = lines(shown, "a <b>", "step", "loss")
    reference, line = re.findall(r'points="([^"]*)"', drawn)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in line.split())
    assert reference == f"{x0:.1f},{y0:.1f} {x2:.1f},{y2:.1f}"
    assert (x1, y1) == (pytest.approx((x0 + x2) / 2, abs=0.1), pytest.approx(y0 + (y2 - y0) / 4, abs=0.1))
    assert 0 < x0 < x2 < 400
    assert 0 < y2 < y0 < 220
    ticks = ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert re.findall(r">([^<]+)</text>", drawn) == ["a &lt;b&gt;", *ticks, "step", *ticks, "loss"]


@pytest.mark.parametrize("value", [0.0, -3.5, 1e-320, 5e-7, 1e12, 1e99])
def test_any_number_can_be_drawn(value: float) -> None:
    for ys in ([value], [value, value], [0.0, value], [value, nan, inf, 1e308]):
        drawn = lines([(range(len(ys)), ys, "points")])
        assert drawn.count("<circle") == sum(abs(y) < 1e100 for y in ys)
        assert not re.search("nan|inf", drawn)
    assert lines([([1.0], [nan], "line")]) == ""
