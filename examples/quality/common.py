"""Shared by the parts: timing, progress lines, training with default values."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dphybrid
from dphybrid.util.errors import UserError

Page = dict[str, Any]
Keep = Callable[[Page], None]
"""Function that saves the results which a part has so far."""


@contextlib.contextmanager
def taking(times: Page) -> Iterator[None]:
    """Put the block's wall time and the CPU time of all threads, in seconds, into `times`."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def train(data: Any, recipe: str, **values: Any) -> Any:
    return dphybrid.train(data, recipe=recipe, devices="cpu", tracking="none", quiet=True, **values)


def installed(name: str) -> str:
    """Return a package's version, or "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def data_path(data: Path | None, name: str) -> Path:
    """Return the path of a part's data. Raises UserError if it does not exist."""
    if data is None or not (data / name).exists():
        raise UserError(f"--data {data}: has no {name}; give the folder that holds it, or use --only text")
    return data / name
