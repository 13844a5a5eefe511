"""Time contestants in turns, so that a busy moment of the machine affects all of them, and format the figures
as text or JSON."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Step = Callable[[], object]
T = TypeVar("T")
_STEPS_A_TURN = 4
Taken = tuple[float, float]
"""(wall-clock seconds, CPU seconds)"""


@dataclass(frozen=True)
class Timing:
    """A contestant's figures over all rounds. ms: median. low_ms, high_ms: 10th and 90th percentile. cpu_ms:
    median of the process's CPU time."""

    ms: float
    low_ms: float
    high_ms: float
    cpu_ms: float

    def __str__(self) -> str:
        return f"{self.ms:10.3f}  ({self.low_ms:.3f} to {self.high_ms:.3f}; CPU {self.cpu_ms:.3f})"


def zipf_ids(num_rows: int, shape: tuple[int, ...], exponent: float = 1.05, seed: int = 0) -> Tensor:
    """Return int64 ids with Zipf's frequencies, rank ** -exponent. Ids of similar rank are far apart in the
    table."""
    chance = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    power = 1 - exponent
    # Draws by the inverse of the distribution function of a continuous power law from 1 to num_rows.
    ranks = ((num_rows**power * chance + 1 - chance) ** (1 / power)).long().clamp_(1, num_rows) - 1
    # Steps of the golden ratio spread neighbours in rank; without a common divisor they visit every row.
    stride = max(1, int(num_rows * 0.6180339887))
    while math.gcd(stride, num_rows) > 1:
        stride += 1
    return ranks * stride % num_rows


def taken(since: Taken = (0.0, 0.0)) -> Taken:
    """Return what the process has used since `since`, the result of an earlier call."""
    wall, cpu = since
    return time.perf_counter() - wall, time.process_time() - cpu


def timing(turns: Sequence[Taken], steps: int = 1) -> Timing:
    """Return the figures of one contestant per step. steps: number of steps in a turn."""
    walls, cpus = (sorted(column) for column in zip(*turns, strict=True))
    low, high = walls[len(turns) // 10], walls[-1 - len(turns) // 10]
    ms, low_ms, high_ms, cpu_ms = (
        1e3 * seconds / steps for seconds in (statistics.median(walls), low, high, statistics.median(cpus))
    )
    return Timing(ms, low_ms, high_ms, cpu_ms)


def race(
    contestants: Mapping[str, Step], rounds: int, warm_up: int = 3, *, cold: bool = False
) -> dict[str, Timing]:
    """Time each contestant over `rounds` interleaved rounds. cold: fill the caches with other memory before
    each turn."""
    found: dict[str, list[Taken]] = {name: [] for name in contestants}
    other = torch.zeros(2**24 if cold else 0)  # 64 MiB
    for turn in range(warm_up + rounds):
        for name, step in contestants.items():
            other.add_(1)  # touches all of it, which drives the contestants' rows out of the caches
            before = taken()
            step()
            took = taken(before)
            if turn >= warm_up:
                found[name].append(took)
    return {name: timing(turns) for name, turns in found.items()}


def race_loops(
    loops: Mapping[str, Iterator[object]], rounds: int, wait: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return the median ms of a step of endless loops, whose turns are four steps long: while the others have
    theirs, a worker thread can prefetch for one step at most. wait: for the devices. Closes the loops."""

    def turn(loop: Iterator[object]) -> Step:
        def run_it() -> None:
            for _ in range(_STEPS_A_TURN):
                next(loop)
            wait()

        return run_it

    with ExitStack() as held:
        # Closing a loop leaves its `with RowPipeline`, which ends the worker thread.
        for loop in loops.values():
            held.callback(loop.close)  # type: ignore[attr-defined]
        timings = race({name: turn(loop) for name, loop in loops.items()}, rounds, warm_up=1)
    return {name: timing.ms / _STEPS_A_TURN for name, timing in timings.items()}


def cycle(batches: list[T]) -> Iterator[T]:
    while True:
        yield from batches


def plain(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results as values that JSON can hold."""
    return {
        name: plain(value)
        if isinstance(value, Mapping)
        else asdict(value)
        if isinstance(value, Timing)
        else value
        for name, value in results.items()
    }


def table_text(results: Mapping[str, Any], indent: str = "") -> str:
    """Return the results as aligned lines."""
    width = max((len(name) for name, value in results.items() if not isinstance(value, Mapping)), default=0)
    lines = []
    for name, value in results.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}", table_text(value, indent + "  ")]
        else:
            lines.append(
                f"{indent}{name:<{width}}  {f'{value:10.3f}' if isinstance(value, float) else value}"
            )
    return "\n".join(lines)
