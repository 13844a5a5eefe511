"""Small runs of every kind, on made-up data: what faults are put under."""

import random
from pathlib import Path

_SMALL = [
    "train.epochs=2",
    "train.log_every=2",
    "train.patience=0",
    "checkpoint.keep_last=1",
    "checkpoint.every_steps=2",
]
_TABLE = ["recipe=ctr", "data.label=clicked", "data.buckets=4", "model.dim=2", "model.hidden=4"]
_TABLE += ["model.layers=1", "train.batch_size=16"]
_TEXT = ["recipe=text", "data.window=8", "data.min_count=1", "model.dim=4", "model.hidden=4"]
_TEXT += ["model.layers=1", "train.batch_size=8"]
_TRIPLES = ["recipe=kge", "model.dim=4", "data.negatives=8", "train.batch_size=32"]
_PAIRS = ["recipe=retrieval", "model.dim=4", "model.hidden=4", "model.width=4", "data.negatives=8"]
_PAIRS += ["data.cutoffs=3", "train.batch_size=32"]

SCENARIOS: dict[str, list[str]] = {
    "ctr, cpu*2": [*_TABLE, "data.path={folder}/clicks.csv", "devices=cpu*2"],
    "hybrid, cpu*8": ["recipe=hybrid", "train.batch_size=3000", "devices=cpu*8"],
    "ctr, cpu": [*_TABLE, "data.path={folder}/clicks.csv", "devices=cpu"],
    "ctr, bfloat16, cpu*8": [
        *_TABLE,
        "data.path={folder}/clicks.csv",
        "table.dtype=bfloat16",
        "devices=cpu*8",
    ],
    "text, cpu*2": [*_TEXT, "data.path={folder}/text.txt", "devices=cpu*2"],
    "text, cpu*8": [*_TEXT, "data.path={folder}/text.txt", "devices=cpu*8"],
    "kge, cpu": [*_TRIPLES, "data.path={folder}/triples.txt", "devices=cpu"],
    "kge, cpu*8": [*_TRIPLES, "data.path={folder}/triples.txt", "devices=cpu*8"],
    "retrieval, cpu": [*_PAIRS, "data.path={folder}/pairs.csv", "devices=cpu"],
    "retrieval, cpu*8": [*_PAIRS, "data.path={folder}/pairs.csv", "devices=cpu*8"],
    "digits, cpu*8": ["recipe=digits", "train.batch_size=600", "devices=cpu*8"],
    "blocks, cpu*2": ["recipe=blocks", "devices=cpu*2"],
    "convnet, cpu*2": ["recipe=convnet", "train.batch_size=200", "devices=cpu*2"],
    "toy, cpu*8": ["recipe=toy", "devices=cpu*8"],
}
"""Name -> overrides of a run that takes about a second: each recipe of the project has one. The first two, a
table and whole GPU blocks beside one, are those of a short test."""


def options_of(name: str, folder: Path) -> list[str]:
    """Return a scenario's overrides, for files that `write_files` put into `folder`."""
    return [text.format(folder=folder) for text in SCENARIOS[name]] + _SMALL


def write_files(folder: Path) -> None:
    """Write the made-up data: the same bytes each time."""
    chosen = random.Random(0)
    clicks = ["age,city,clicked"]
    for _ in range(60):
        age, city = chosen.randint(18, 80), chosen.choice("abcd")
        clicks.append(f"{age},{city},{'yes' if age > 45 or city == 'a' else 'no'}")
    words = [f"word{number}" for number in range(20)]
    lines = [" ".join(chosen.choices(words, k=20)) for _ in range(40)]
    triples = [
        f"e{chosen.randrange(20)}\tr{chosen.randrange(3)}\te{chosen.randrange(20)}" for _ in range(300)
    ]
    pairs = ["user,item", *(f"u{chosen.randrange(20)},i{chosen.randrange(30)}" for _ in range(200))]
    files = {"clicks.csv": clicks, "text.txt": lines, "triples.txt": triples, "pairs.csv": pairs}
    for name, rows in files.items():
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
