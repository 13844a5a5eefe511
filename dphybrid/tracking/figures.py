"""Pictures of a run as PNG bytes, drawn by matplotlib without a screen."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = ("#2f6f9f", "#d1793b", "#4f9d69", "#a3497d", "#8a8f3c", "#5b5ea6", "#b84a4a", "#4aa3a3", "#7d6b57", "#888888")


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def rows_per_replica_figure(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the rows each replica got, one group of bars a distinct split. rows: as `SplitLog.rows` gives them."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row["where"]).rpartition(" / ")[0], []).append(row)
    shown = list(groups.items())[:8]
    figure = _figure(8, 1.2 + 0.9 * len(shown) + 0.12 * sum(len(g) for _, g in shown))
    axes = figure.subplots()
    place, ticks, labels = 0.0, [], []
    for number, (_, group) in enumerate(shown):
        for replica, row in enumerate(group):
            axes.barh(place, row["rows"], color=_COLOURS[number % len(_COLOURS)])
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
    axes.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def stage_figure(stages: Mapping[str, float]) -> bytes:
    """Draw where the seconds of a run went, largest stage first."""
    ordered = sorted(((name, seconds) for name, seconds in stages.items() if seconds > 0), key=lambda item: -item[1])
    total = sum(seconds for _, seconds in ordered) or 1.0
    figure = _figure(8, 1.0 + 0.32 * max(1, len(ordered)))
    axes = figure.subplots()
    for place, (name, seconds) in enumerate(ordered):
        axes.barh(place, seconds, color=_COLOURS[place % len(_COLOURS)])
        axes.text(seconds, place, f" {seconds:.2f} s, {seconds / total:.0%}", va="center", fontsize=8)
        axes.text(0, place, f"{name} ", ha="right", va="center", fontsize=8)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds")
    axes.set_title(f"Where {total:.1f} s went", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return _png(figure)


def curves_figure(curves: Mapping[str, Sequence[tuple[float, float]]], xlabel: str) -> bytes:
    """Draw one panel a curve: name -> points (x, y)."""
    figure = _figure(4 * max(1, len(curves)), 3)
    panels = figure.subplots(1, max(1, len(curves)), squeeze=False)[0]
    for number, (axes, (name, points)) in enumerate(zip(panels, curves.items(), strict=False)):
        axes.plot(
            [x for x, _ in points], [y for _, y in points], marker="o" if len(points) < 30 else None, color=_COLOURS[number]
        )
        axes.set_title(name, loc="left")
        axes.set_xlabel(xlabel)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return _png(figure)
