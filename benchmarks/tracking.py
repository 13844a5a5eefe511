"""The cost of recording a run: the same training steps with recording on and off, in turns."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import flags, show
from dphybrid.tracking.opening import open_tracker
from dphybrid.tracking.tracker import Tracker

LOG_EVERY = (1, 20)
"""Steps from one call to the next, of each case: the worst one, and train.log_every's default."""
METRICS = 25
"""Metrics per call, about as many as a training logs."""


def run(rounds: int = 15, steps: int = 40, step_ms: float = 10.0) -> dict[str, Any]:
    """Measure and return the figures.

    rounds: number of blocks of `steps` steps, each with recording on and off. step_ms: approximate time of a
    step, which is made of matrix products.
    """
    work = _work_of(step_ms)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "metrics": METRICS,
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        recording = open_tracker(None, "bench", Path(folder))
        recording.start("bench", {}, {}, "")
        for every in LOG_EVERY:
            result["cases"].append(_case(work, recording, every, rounds, steps))
        calls = _calls_us(recording)
        recording.finish("FINISHED")
    return result | {"call_us": calls}


def _work_of(step_ms: float) -> Callable[[], None]:
    matrix = torch.randn(256, 256)

    def once(repeats: int) -> None:
        for _ in range(repeats):
            torch.mm(matrix, matrix)

    once(20)  # warm-up
    start = time.perf_counter()
    once(100)
    # Ten times the seconds of a hundred products are the milliseconds of one.
    repeats = max(1, round(step_ms / ((time.perf_counter() - start) * 10)))
    return lambda: once(repeats)


def _block(
    work: Callable[[], None], tracker: Tracker, every: int, first: int, steps: int
) -> tuple[float, float]:
    """Return a step's milliseconds: wall-clock time, and CPU time of the training thread."""
    wall, processor = time.perf_counter(), time.thread_time()
    for step in range(first, first + steps):
        work()
        if step % every == 0:
            tracker.log_metrics({f"bench/value_{i}": step + i / 10 for i in range(METRICS)}, step)
    return 1e3 * (time.perf_counter() - wall) / steps, 1e3 * (time.thread_time() - processor) / steps


def _case(
    work: Callable[[], None], recording: Tracker, every: int, rounds: int, steps: int
) -> dict[str, Any]:
    off = Tracker()  # the base class records nothing
    _block(work, recording, every, 0, steps)  # warm-up
    pairs = []
    for number in range(rounds):
        # In alternating order, so that neither one is always first.
        order = (off, recording) if number % 2 else (recording, off)
        means = {id(tracker): _block(work, tracker, every, (number + 1) * steps, steps) for tracker in order}
        pairs.append((means[id(off)], means[id(recording)]))
    wall, processor = (sorted(on[clock] / without[clock] for without, on in pairs) for clock in (0, 1))
    return {
        "log_every": every,
        "step_ms_off": statistics.median(without[0] for without, _ in pairs),
        "step_ms_on": statistics.median(on[0] for _, on in pairs),
        "ratio_median": statistics.median(wall),
        "ratio_quartiles": [wall[len(wall) // 4], wall[3 * len(wall) // 4]],
        "thread_ratio_median": statistics.median(processor),
    }


def _calls_us(recording: Tracker) -> dict[str, float]:
    times = []
    for step in range(1000):
        start = time.perf_counter()
        recording.log_metrics({f"call/value_{i}": 0.5 for i in range(METRICS)}, step)
        times.append(1e6 * (time.perf_counter() - start))
    times.sort()
    return {"p50": times[500], "p95": times[950], "max": times[-1]}


def text(result: dict[str, Any]) -> str:
    """Return the figures as a table to print."""
    lines = [
        f"{'recorded':>16}  {'off, ms':>9}  {'on, ms':>9}  {'on / off':>9}  {'quartiles':>15}  "
        f"{'thread time':>11}"
    ]
    for case in result["cases"]:
        low, high = case["ratio_quartiles"]
        lines.append(
            f"{'every step' if case['log_every'] == 1 else 'every {} steps'.format(case['log_every']):>16}  "
            f"{case['step_ms_off']:>9.2f}  {case['step_ms_on']:>9.2f}  {case['ratio_median']:>9.4f}  "
            f"{low:>7.4f} {high:>7.4f}  {case['thread_ratio_median']:>11.4f}"
        )
    call = result["call_us"]
    lines.append(
        "thread time: CPU time of the training thread, on / off, which leaves out the load of other programs"
    )
    lines.append(
        f"one call with {result['metrics']} numbers: p50 {call['p50']:.0f} us, p95 {call['p95']:.0f} us, max "
        f"{call['max']:.0f} us; torch {result['torch']}, {result['threads']} threads"
    )
    return "\n".join(lines)


def main() -> None:
    options = flags(__doc__, repeats=15).parse_args()
    show(run(options.repeats), text, options.out)


if __name__ == "__main__":
    main()
