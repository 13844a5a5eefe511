"""Pictures of a run as PNG bytes, drawn by matplotlib without a screen."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dphybrid.util.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _panels(
    width: float, height: float, rows: int = 1, columns: int = 1, grid: bool = True
) -> "tuple[Figure, list[Axes]]":
    """Return a figure and its panels, line by line."""
    from matplotlib.figure import Figure

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
    FigureCanvasAgg(figure).print_png(stream)  # savefig draws twice: the layout alone, then all
    return stream.getvalue()


def _plain(text: str) -> str:
    """Return a text that matplotlib draws as it is: between two dollar signs it would read a formula."""
    return text.replace("$", r"\$")


def rows_per_replica_figure(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the rows each replica got, one group of bars a distinct split. rows: of the split table."""
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
    """Draw points (x, y) and the line where both are equal; zero: where y is 0."""
    figure, (axes,) = _panels(5, 4.5)
    ends = [min(map(min, points)), max(map(max, points))]
    if zero:
        axes.axhline(0.0, linestyle="--", color="#999999")
    else:
        axes.plot(ends, ends, linestyle="--", color="#999999")
    axes.scatter([x for x, _ in points], [y for _, y in points], s=14, color="C0")
    axes.set_title(_plain("\n".join(textwrap.wrap(title, 60))), loc="left", fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return _png(figure)


def confusion_figure(title: str, classes: Sequence[str], counts: Sequence[Sequence[float]]) -> bytes:
    """Draw each class's rows by the class they are taken for, as shares of the class: a line a class, its
    recall on the diagonal."""
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
    axes.set_xticks(range(len(names)), list(map(_plain, names)), rotation=45, ha="right", fontsize=9)
    rows = [f"{_plain(name)} ({total:,.6g})" for name, total in zip(names, totals, strict=True)]
    axes.set_yticks(range(len(names)), rows, fontsize=9)
    axes.set_title(_plain("\n".join(textwrap.wrap(title, 48))), loc="left", fontsize=10)
    axes.set_xlabel("taken for")
    axes.set_ylabel("class (rows)")
    return _png(figure)
