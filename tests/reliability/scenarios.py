"""Small runs of every recipe on generated data, for tests of faults."""

import random
from pathlib import Path

from tests.reliability.trials import RUNS, SMALL, TABLE, write_clicks

TEXT = ["recipe=text", "data.window=8", "data.min_count=1", "model.dim=4", "model.hidden=4"]
TEXT += ["model.layers=1", "train.batch_size=8", "data.path={folder}/text.txt"]
TRIPLES = ["recipe=kge", "model.dim=4", "data.negatives=8", "train.batch_size=32"]
TRIPLES += ["data.path={folder}/triples.txt"]
PAIRS = ["recipe=retrieval", "model.dim=4", "model.softmax=sampled", "data.negatives=8"]
PAIRS += ["data.cutoffs=3", "train.batch_size=32", "data.path={folder}/pairs.csv"]
CLICKS = [*TABLE, "data.path={folder}/clicks.csv"]

OTHERS: dict[str, list[str]] = {
    "ctr, cpu": [*CLICKS, "devices=cpu"],
    "ctr, bfloat16, cpu*8": [*CLICKS, "table.dtype=bfloat16", "devices=cpu*8"],
    "text, cpu*2": [*TEXT, "devices=cpu*2"],
    "text, cpu*8": [*TEXT, "devices=cpu*8"],
    "kge, cpu": [*TRIPLES, "devices=cpu"],
    "kge, cpu*8": [*TRIPLES, "devices=cpu*8"],
    "retrieval, cpu": [*PAIRS, "devices=cpu"],
    "retrieval, cpu*8": [*PAIRS, "devices=cpu*8"],
    "digits, cpu*8": ["recipe=digits", "train.batch_size=600", "devices=cpu*8"],
    "blocks, cpu*2": ["recipe=blocks", "devices=cpu*2"],
    "convnet, cpu*2": ["recipe=convnet", "train.batch_size=200", "devices=cpu*2"],
    "toy, cpu*8": ["recipe=toy", "devices=cpu*8"],
}
SCENARIOS = RUNS | {name: [*overrides, *SMALL] for name, overrides in OTHERS.items()}
"""Name -> overrides of a run that takes about a second; every built-in recipe has one."""


def options_of(name: str, folder: Path) -> list[str]:
    """Return a scenario's overrides, for the files that `write_files` writes into `folder`."""
    return [text.format(folder=folder) for text in SCENARIOS[name]]


def write_files(folder: Path) -> None:
    """Write the generated data: the same bytes each time."""
    write_clicks(folder)
    chosen = random.Random(0)
    words = [f"word{number}" for number in range(20)]
    lines = [" ".join(chosen.choices(words, k=20)) for _ in range(40)]
    triples = [
        f"e{chosen.randrange(20)}\tr{chosen.randrange(3)}\te{chosen.randrange(20)}" for _ in range(300)
    ]
    pairs = ["user,item", *(f"u{chosen.randrange(20)},i{chosen.randrange(30)}" for _ in range(200))]
    for name, rows in {"text.txt": lines, "triples.txt": triples, "pairs.csv": pairs}.items():
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
