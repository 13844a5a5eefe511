"""The cost of recording a run: the same training steps with recording on and off, in turns."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import flags, show
from benchmarks.racing import Step, plain, race, table_text
from dphybrid.tracking.opening import open_tracker
from dphybrid.tracking.tracker import Tracker

METRICS = 25
"""Metrics per call, about as many as a training logs."""
STEPS, PRODUCTS = 40, 40
"""Steps of a turn, and products of two matrices of 256 in a step, which take about 10 ms."""


def run(rounds: int = 15) -> dict[str, Any]:
    """Return the timings of turns of 40 steps: without a record, recorded at every step, and every 20 steps
    (train.log_every's default); and of one call alone."""
    matrix, logged = torch.randn(256, 256), 0

    def turn(tracker: Tracker, every: int) -> Step:
        def run_it() -> None:
            for step in range(STEPS):
                for _ in range(PRODUCTS):
                    torch.mm(matrix, matrix)
                if step % every == 0:
                    call(tracker)

        return run_it

    def call(tracker: Tracker) -> None:
        nonlocal logged
        logged += 1
        tracker.log_metrics({f"bench/value_{i}": logged + i / 10 for i in range(METRICS)}, logged)

    with tempfile.TemporaryDirectory() as folder:
        recording = open_tracker(None, "bench", Path(folder))
        recording.start("bench", {}, {}, "")
        off = Tracker()  # the base class records nothing
        turns = {"no record": turn(off, 1), "every step": turn(recording, 1), "every 20": turn(recording, 20)}
        timings = race(turns, rounds)
        calls = race({f"one call with {METRICS} metrics": lambda: call(recording)}, 1000)
        recording.finish("FINISHED")
    base = timings["no record"].ms
    ratios = {f"{name} / no record": timing.ms / base for name, timing in timings.items()}
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return {**facts, f"ms of {STEPS} steps": timings, "ms": calls, "ratios": ratios}


def main() -> None:
    options = flags(__doc__, repeats=15).parse_args()
    show(plain(found := run(options.repeats)), lambda _: table_text(found), options.out)


if __name__ == "__main__":
    main()
