"""Make the page docs/proven.md, which claim was tested on which hardware, from the files in `results/`.

`python -m tests.gpu.proven` writes the page. Each run on a GPU adds a file to `results/`: model, versions,
date, and the tests that passed.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "proven.md"

HEAD = """# What is proven on which hardware

The table lists the tests that have shown each claim, by kind of hardware. Tests on virtual devices compute on
the CPU what several devices would compute. Tests on stand-ins check calls to a stand-in for CUDA or
NVML. Neither proves that a GPU behaves the same, and none of them measures speed on a GPU.

"""


def results() -> list[dict[str, Any]]:
    """Return the result files, GPUs last."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json")) if path.stem != "claims"]
    return sorted(found, key=lambda result: "GPU" in result["hardware"])


def page() -> str:
    """Return the text of the page."""
    claims, found = json.loads((RESULTS / "claims.json").read_text()), results()
    names = [result["hardware"] for result in found]
    lines = [f"| claim | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for claim, sentence in claims.items():
        cells = []
        for result in found:
            tests = result["shown"].get(claim, [])
            empty = "" if result["date"] else "not yet run"
            cells.append("<br>".join(f"`{test.partition('::')[2]}`" for test in tests) or empty)
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
    PAGE.write_text(page())
