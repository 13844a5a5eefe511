"""What the parts share: timing, lines for people, training as it comes."""

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
"""Takes the figures that a part has so far."""


@contextlib.contextmanager
def taking(times: Page) -> Iterator[None]:
    """Put the seconds of the block, on the clock and of all threads, into `times`."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def train(data: Any, recipe: str, **values: Any) -> Any:
    return dphybrid.train(data, recipe=recipe, devices="cpu", tracking="none", quiet=True, **values)


def installed(name: str) -> str:
    """Return a package's version, "" where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def there(data: Path | None, name: str) -> Path:
    """Return what a part reads. Raises UserError when it is not there."""
    if data is None or not (data / name).exists():
        raise UserError(f"--data {data}: there is no {name}; name the folder that holds it, or --only text")
    return data / name
