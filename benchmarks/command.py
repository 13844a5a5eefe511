"""The command line that all benchmarks share."""

import argparse
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dphybrid.util.files import write_json


def at_least_one(text: str) -> int:
    """Return the integer that a flag gives. Raises ArgumentTypeError below 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give an integer from 1 on")
    return int(text)


def flags(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with `--repeats` and `--out`.

    description: a module's docstring, of which the help shows the first paragraph.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    parser.add_argument(
        "--repeats",
        type=at_least_one,
        default=repeats,
        metavar="N",
        help=f"rounds of each median ({repeats})",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    return parser


def processor() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def show(result: dict[str, Any], text: Callable[[dict[str, Any]], str], out: Path | None) -> None:
    """Print a benchmark's figures, and write them where `--out` says."""
    print(text(result))
    if out:
        write_json(out, result)
