"""Many small steps, with evaluations, checkpoints and records among them: memory, file handles and threads
stay level.

Some seconds by default, which shows handles and threads; DPHYBRID_SOAK_MINUTES=20 shows memory, too.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.waiting import patience, wait_until

pytestmark = pytest.mark.nightly

MINUTES = float(os.environ.get("DPHYBRID_SOAK_MINUTES", "0.1"))
ROWS = 6400
"""Of the training split and more: 180 steps an epoch."""


@pytest.mark.slow
@pytest.mark.timeout(int(MINUTES * 60) + 600)
def test_memory_handles_and_threads_stay_level_over_small_steps(data_dir: Path, tmp_path: Path) -> None:
    chosen = random.Random(0)
    rows = [f"{chosen.randrange(2)},{chosen.gauss(0, 1):.3f},{chosen.randrange(500)}x" for _ in range(ROWS)]
    (tmp_path / "clicks.csv").write_text("\n".join(["clicked,number,city", *rows]))
    command = "train --recipe ctr --data.path clicks.csv --data.label clicked --devices cpu*2 --run-name soak"
    command += " --train.batch-size 32 --train.epochs 1000000 --train.patience 0 --model.dim 4"
    command += " --model.hidden 8 --checkpoint.every-steps 50"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dphybrid", *command.split()], stdout=log, stderr=log
        )
    try:
        checkpoints = data_dir / "runs" / "soak" / "checkpoints"
        wait_until(
            lambda: process.poll() is not None or len(list(checkpoints.glob("step-*"))) > 1,
            "a second checkpoint",
        )
        seen = samples(psutil.Process(process.pid), data_dir / "runs" / "soak", MINUTES * 60)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(patience(60))
    text = (tmp_path / "log").read_text()
    assert process.returncode == 143, text[-3000:]
    steps = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
    level = seen[len(seen) // 4 :]  # caches fill first
    minutes = (level[:, 0] - level[0, 0]) / 60
    slopes = [float(np.polyfit(minutes, level[:, column], 1)[0]) for column in (1, 2, 3, 4)]
    print(
        f"{steps} steps in {seen[-1, 0] / 60:.1f} min; from {level[0, 1:]} to {level[-1, 1:]}; a minute: "
        f"{slopes[0]:+.3f} MiB, {slopes[1]:+.4f} handles, {slopes[2]:+.4f} threads, "
        f"{slopes[3]:+.3f} MiB of record"
    )
    half = len(level) // 2
    for column, slack in ((2, 3), (3, 2)):  # what a checkpoint or a sent record has open meanwhile
        assert level[half:, column].max() <= level[:half, column].max() + slack, seen[:, column]
    if MINUTES >= 5:
        assert slopes[0] < 0.5, f"{slopes[0]:.2f} MiB a minute"
        assert abs(slopes[1]) < 0.05
        assert abs(slopes[2]) < 0.05


def samples(process: psutil.Process, run: Path, seconds: float) -> np.ndarray:
    """Return time (s), resident memory (MiB), file handles and threads of a process, and the size of its
    record (MiB), a row for each look."""
    start = time.monotonic()
    rows = []
    while (now := time.monotonic() - start) < seconds:
        record = sum(file.stat().st_size for file in run.glob("record.*"))
        handles, threads = process.num_fds(), process.num_threads()
        rows.append((now, process.memory_info().rss / 2**20, handles, threads, record / 2**20))
        time.sleep(min(1.0, seconds / 60))
    return np.array(rows)
