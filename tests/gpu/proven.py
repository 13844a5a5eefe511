"""Make the last section of docs/reliability.md, which claim was tested on which hardware, from `results/`.

`python -m tests.gpu.proven` writes it. Each run on a GPU adds a file to `results/`: model, versions,
date, and the tests that passed.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "reliability.md"

HEADING = "## What is proven on which hardware\n\n"
HEAD = f"""{HEADING}Virtual devices compute on the CPU what several devices would compute. Stand-ins for CUDA
and NVML record how they are called. Neither proves that a GPU behaves the same, and none of them measures
speed on a GPU. The files in `tests/gpu/results/` name the tests.

"""


def results() -> list[dict[str, Any]]:
    """Return the result files, GPUs last."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json")) if path.stem != "claims"]
    return sorted(found, key=lambda result: "GPU" in result["hardware"])


def section() -> str:
    """Return the text of the section."""
    claims, found = json.loads((RESULTS / "claims.json").read_text()), results()
    names = [result["hardware"] for result in found]
    lines = [f"| claim | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for claim, sentence in claims.items():
        cells = []
        for result in found:
            empty = "" if result["date"] else "not yet run"
            cells.append("tested" if result["shown"].get(claim) else empty)
        lines.append(f"| {sentence} | {' | '.join(cells)} |")
    dated = [
        f"- {result['hardware']}: {result['date']}, "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        if result["date"]
        else f"- {result['hardware']}: not yet run"
        for result in found
    ]
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(dated) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(HEADING)[0] + section())
