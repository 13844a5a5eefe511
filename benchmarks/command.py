"""The command line that all benchmarks share."""

import argparse
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dphybrid.util.files import write_json


def flags(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with `--repeats` and `--out`.

    description: the docstring of a benchmark; the help shows its first paragraph.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    told = f"measurements per median (default: {repeats})"
    parser.add_argument("--repeats", type=int, default=repeats, metavar="N", help=told)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures to FILE as JSON")
    return parser


def processor() -> str:
    """Return the processor's name."""
    # On Linux platform.processor() has no more than the architecture.
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def show(result: dict[str, Any], text: Callable[[dict[str, Any]], str], out: Path | None) -> None:
    """Print a benchmark's figures, and write them to `out` if given."""
    print(text(result))
    if out:
        write_json(out, result)
