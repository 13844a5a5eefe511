"""Draw the networks of the recipes: small pictures for the page that says which one to use.

    python docs/draw_networks.py        # writes docs/pictures/network-*.svg

A picture is columns of boxes from left to right. Each box of a list has arrows from all boxes of the column
before, each box of a tuple from the one at its own place. Orange boxes are rows of a table in host memory,
green ones are computed on the devices.
"""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).with_name("pictures")
WIDE, HIGH, GAP_X, GAP_Y, EDGE = 132, 30, 26, 10, 6
COLOURS = {"host": ("#fff3e0", "#e65100"), "device": ("#e8f5e9", "#2e7d32")}

NETWORKS: dict[str, list[Sequence[str]]] = {
    "mlp": [["*rows", "numbers in bins"], ["side by side"], ["hidden layers"], ["answer"]],
    "dlrm": [["*rows", "numbers, a layer"], ["product of each pair"], ["hidden layers"], ["answer"]],
    "dcn": [["*rows", "numbers in bins"], ["input x its map", "hidden layers"], ["answer: the sum"]],
    "bag": [["*rows of all items"], ["sum / root of n"], ["tanh"], ["x output vectors"]],
    "transformer": [
        ["*rows in order", "positions"],
        ["causal attention"],
        ["vector after each"],
        ["x output vectors"],
    ],
    "complex": [["*head", "*tail", "relation"], ["complex product"], ["score"]],
    "transe": [["*head", "*tail", "relation"], ["head + relation - tail"], ["score: - length"]],
    "text": [["*rows of the words"], ["LSTM or decoder"], ["softmax over words"]],
}


def drawing(name: str, columns: list[Sequence[str]]) -> str:
    """Return the picture of a network. `*` begins a box of rows in host memory."""
    most = max(map(len, columns))
    width = 2 * EDGE + len(columns) * WIDE + (len(columns) - 1) * GAP_X
    height = 2 * EDGE + most * HIGH + (most - 1) * GAP_Y
    boxes, arrows, before = list[str](), list[str](), list[float]()
    for number, column in enumerate(columns):
        x = EDGE + number * (WIDE + GAP_X)
        top = (height - len(column) * HIGH - (len(column) - 1) * GAP_Y) / 2
        middles = [top + place * (HIGH + GAP_Y) + HIGH / 2 for place in range(len(column))]
        pairs = [(start, end) for start in before for end in middles]
        if isinstance(column, tuple):
            pairs = list(zip(before, middles, strict=True))
        arrows += [
            f'<path d="M{x - GAP_X} {start:g}L{x - 3} {end:g}" stroke="#607d8b" marker-end="url(#tip)"/>'
            for start, end in pairs
        ]
        for words, y in zip(column, middles, strict=True):
            fill, line = COLOURS["host" if words.startswith("*") else "device"]
            size = f'width="{WIDE}" height="{HIGH}" rx="5"'
            boxes += [
                f'<rect x="{x}" y="{y - HIGH / 2:g}" {size} fill="{fill}" stroke="{line}"/>',
                f'<text x="{x + WIDE / 2:g}" y="{y + 4:g}">{escape(words.lstrip("*"))}</text>',
            ]
        before = middles
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="The network {name}" font-size="12" '
            'font-family="Helvetica, Arial, sans-serif" text-anchor="middle">',
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
            'orient="auto"><path d="M0 0 10 5 0 10z" fill="#607d8b"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    for name, columns in NETWORKS.items():
        (OUT / f"network-{name}.svg").write_text(drawing(name, columns), encoding="utf-8")
