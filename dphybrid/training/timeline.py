"""One step of a profile as a picture: what the main thread, other threads, copies and devices did."""

import gzip
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dphybrid.util.labels import PREFIX

_WIDTH, _LEFT, _ROW, _TOP = 1200, 150, 22, 46
_COLOURS = ("#8ecae6", "#f4a9a0", "#b7e4c7", "#ffe08a", "#d9b8f0", "#d0d0d0", "#f4c6d7", "#c9d6a3", "#a9b8f0")
_BEGIN = "zero_grad"
"""The stage with which a step begins."""


@dataclass(frozen=True)
class Bar:
    """What a lane did, in ms since the step began. depth: of labels within labels."""

    lane: str
    label: str
    begin_ms: float
    end_ms: float
    depth: int


def read_bars(trace: Path) -> list[Bar]:
    """Return the bars of the last whole step in a trace, or, of a single one, from its begin to the trace's
    end. Empty where the trace has no labels."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    labels = [event for event in events if event["name"].startswith(PREFIX) and _on_host(event)]
    begins = sorted(event["ts"] for event in labels if event["name"] == f"{PREFIX}{_BEGIN}")
    if not begins:
        return []
    ends = max(event["ts"] + event["dur"] for event in labels)
    begin, end = (begins[-2], begins[-1]) if len(begins) > 1 else (begins[0], ends)
    main = next(event["tid"] for event in labels if event["name"] == f"{PREFIX}{_BEGIN}")
    names = _lanes(labels, main)
    lanes = [(names[event["tid"]], event["name"].removeprefix(PREFIX), event) for event in labels]
    lanes += [
        (f"{_DEVICE[event['cat']]} {event['pid']}", event["name"], event)
        for event in events
        if _on_device(event)
    ]
    bars: list[Bar] = []
    open_until: dict[str, list[float]] = {}
    for lane, label, event in sorted(lanes, key=lambda entry: (entry[2]["ts"], -entry[2]["dur"])):
        first, last = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if last <= first:
            continue
        around = open_until.setdefault(lane, [])
        while around and around[-1] <= first:
            around.pop()
        bars.append(Bar(lane, label, 1e-3 * (first - begin), 1e-3 * (last - begin), len(around)))
        around.append(last)
    return bars


_DEVICE = {"kernel": "device", "gpu_memcpy": "copies of device", "gpu_memset": "device"}


def _on_host(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def _on_device(event: dict[str, Any]) -> bool:
    return event.get("cat") in _DEVICE


def _lanes(labels: list[dict[str, Any]], main: int) -> dict[int, str]:
    """Name threads by what they do: the main one, and others by their first label."""
    names = {main: "main thread"}
    for event in labels:
        names.setdefault(event["tid"], f"thread: {event['name'].removeprefix(PREFIX)}")
    return names


def draw(bars: list[Bar], title: str) -> str:
    """Return the picture as SVG."""
    span = max((bar.end_ms for bar in bars), default=1.0)
    scale = (_WIDTH - _LEFT - 20) / span
    colour = {
        label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(dict.fromkeys(b.label for b in bars))
    }
    parts, top = [], _TOP
    for lane in dict.fromkeys(bar.lane for bar in sorted(bars, key=lambda bar: bar.lane != "main thread")):
        own = [bar for bar in bars if bar.lane == lane]
        parts.append(f'<text x="8" y="{top + 15}">{html.escape(lane)}</text>')
        for bar in own:
            x, width = _LEFT + scale * bar.begin_ms, max(1.0, scale * (bar.end_ms - bar.begin_ms))
            y = top + _ROW * bar.depth
            told = html.escape(f"{bar.label}: {bar.end_ms - bar.begin_ms:.3f} ms from {bar.begin_ms:.3f}")
            parts.append(
                f'<g><title>{told}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 3}" '
                f'fill="{colour[bar.label]}"/>'
            )
            if width > 7 * len(bar.label):
                parts.append(
                    f'<text x="{x + 3:.1f}" y="{y + 14}" fill="#111">{html.escape(bar.label)}</text>'
                )
            parts.append("</g>")
        top += _ROW * (1 + max(bar.depth for bar in own)) + 10
    ticks = "".join(
        f'<text x="{_LEFT + scale * span * i / 5:.0f}" y="{top + 14}">{span * i / 5:.2f} ms</text>'
        for i in range(6)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 40}" height="{top + 26}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="8" y="24" font-size="16">{html.escape(title)}</text>{"".join(parts)}{ticks}</svg>\n'
    )
