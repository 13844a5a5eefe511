"""`dphybrid selftest`: tries kills, power loss and a full disk on the user's own disk.

All runs are in one scratch folder inside the data folder, which is removed afterwards. Each run is a separate
process, forked from one that has imported everything.
"""

import math
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sklearn.metrics
import torch

from dphybrid.config.settings import Settings, load_settings
from dphybrid.data.table import source as _source
from dphybrid.recipes.configs import load_config
from dphybrid.run.folder import all_runs
from dphybrid.run.pages import Report, ResultPage
from dphybrid.run.train import run_job
from dphybrid.selftest.faults import ERRORS, KILLED, Faults
from dphybrid.training.checkpoint import complete_checkpoints, read_state
from dphybrid.util.errors import UserError
from dphybrid.util.files import read_json, scratch_folder

torch.set_num_threads(1)
_IMPORTED = (_source, sklearn.metrics)
"""Modules that a run imports late. Imported here, so that the forked processes have them."""

SMALL = ["train.epochs=2", "train.log_every=2", "train.patience=0"]
SMALL += ["checkpoint.keep_last=1", "checkpoint.every_steps=2"]
TABLE = ["recipe=ctr", "data.label=clicked", "data.buckets=4", "model.dim=2", "model.hidden=4"]
TABLE += ["model.layers=1", "train.batch_size=16"]
RUNS = {
    "ctr, cpu*2": [*TABLE, *SMALL, "data.path={folder}/clicks.csv", "devices=cpu*2"],
    "hybrid, cpu*8": ["recipe=hybrid", "train.batch_size=3000", "devices=cpu*8", *SMALL],
}
"""Name -> overrides for a run of about a second: a table of columns, and a hybrid model with GPU blocks."""


def write_clicks(folder: Path) -> None:
    """Write the table that `RUNS` train on, always with the same bytes."""
    chosen = random.Random(0)
    clicks = ["age,city,clicked"]
    for _ in range(60):
        age, city = chosen.randint(18, 80), chosen.choice("abcd")
        clicks.append(f"{age},{city},{'yes' if age > 45 or city == 'a' else 'no'}")
    (folder / "clicks.csv").write_text("\n".join(clicks) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Ended:
    """How a run ended.

    code: 0 finished, 1 unexpected exception, 2 UserError, 137 killed by the layer of faults, -9 killed from
    outside. operations: the number of operations on files below its data folder. unsafe: names that a power
    loss would have emptied or undone. output: what the run printed.
    """

    code: int
    operations: int
    unsafe: list[str]
    output: str


def run_trial(
    data_dir: Path,
    overrides: list[str],
    target: int = 0,
    mode: str = "kill",
    kill_after_s: float | None = None,
    recorded: bool = False,
    slow_s: float = 0.0,
) -> _Ended:
    """Start a run in `data_dir`, or resume the run in it, and break file operation `target` (0: none).

    mode: one of `faults.MODES`. kill_after_s: send SIGKILL after so many seconds. recorded: track in the
    embedded MLflow store. slow_s: delay of each fsync.
    """
    context = get_context("forkserver")
    # Importing takes seconds; forking a process that has imported this module takes milliseconds.
    context.set_forkserver_preload([__name__])
    log = data_dir.parent / f"{data_dir.name}.log"
    log.unlink(missing_ok=True)
    fault = (target, mode, slow_s)
    child = context.Process(target=_work, args=(data_dir, overrides, fault, log, recorded))
    child.start()
    if kill_after_s is not None:
        child.join(kill_after_s)
        child.kill()
    child.join(120)
    if child.is_alive():
        child.kill()
        raise TimeoutError(log.read_text(encoding="utf-8"))
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    counted = re.search(r"^operations (\d+)$", text, re.MULTILINE)
    unsafe = re.findall(r"^unsafe (.*)$", text, re.MULTILINE)
    return _Ended(child.exitcode or 0, int(counted[1]) if counted else 0, unsafe, text)


def _work(
    data_dir: Path, overrides: list[str], fault: tuple[int, str, float], log: Path, recorded: bool
) -> None:
    sys.stdout = sys.stderr = log.open("w", buffering=1, encoding="utf-8")
    # The user's own settings must not change the trials.
    for name in [name for name in os.environ if name.startswith(("DPHYBRID_", "MLFLOW_"))]:
        del os.environ[name]
    os.environ.update(DPHYBRID_DATA_DIR=str(data_dir), DPHYBRID_THREADS="1")
    if not recorded:
        os.environ["DPHYBRID_TRACKING_URI"] = "none"
    os.chdir(data_dir.parent)
    target, mode, slow_s = fault
    faults = Faults(data_dir, target, mode, seed=target, slow_s=slow_s)
    faults.install()
    code = 0
    try:
        settings, config = load_settings(), load_config(None, overrides)
        resume = bool(all_runs(settings))
        run_job(config, settings, run_name=None if resume else "run", resume="latest" if resume else None)
    except UserError as error:
        print(f"error: {error}")
        code = 2
    except BaseException:  # noqa: BLE001 - the process ends below, and only the log remains
        traceback.print_exc()
        code = 1
    # `run_trial` reads these lines from the log.
    print("\n".join([f"operations {faults.count}", *(f"unsafe {name}" for name in faults.unsafe())]))
    os._exit(code)


def run_results(data_dir: Path) -> dict[str, object]:
    """Return the results of the finished run in `data_dir` that must not depend on interruptions."""
    (folder,) = (path.parent for path in data_dir.glob("runs/*/report.json"))
    report, result = Report.read(folder / "report.json"), ResultPage.read(folder / "result.json")
    there = complete_checkpoints(folder / "checkpoints")
    return {
        "metrics": report.metrics,
        "digests": report.digests,
        "history": result.history,
        "best": Path(result.best_checkpoint).name,
        "checkpoints": [path.name for path in there],
        "sums": [read_state(path).digests for path in there],
        "splits": [asdict(row) for row in result.splits],
        "lines": result.split_lines,
        "leftovers": sorted(path.name for path in folder.rglob(".*") if path.name != ".lock"),
        "prepared": read_json(next(data_dir.glob("prepared/*/manifest.json")))["arrays"],
    }


QUIET_S = 20.0
"""After so many seconds without a line, the selftest prints its progress."""


@dataclass
class Kind:
    """One kind of fault and its trials so far. modes: of `faults.MODES`; empty to kill the run from outside.
    broken: a complaint for each failed trial."""

    fault: str
    how: str
    modes: tuple[str, ...] = ()
    tried: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """The result of the trials, in words."""
        if self.broken:
            return f"BROKEN {len(self.broken)} times"
        # Upper 95 % confidence bound p of the failure rate after n passes: (1 - p) ** n = 0.05.
        return f"fails in at most {math.ceil(100 * (1 - 0.05 ** (1 / self.tried)))} % of cases"


def run(
    settings: Settings, trials: int, minutes: float, seed: int | None, tell: Callable[[str], None]
) -> list[Kind]:
    """Try each kind of fault at least `trials` times and for at least `minutes`; return the results.

    seed: chooses the faults; None for a random one. tell: called with lines to print.

    Raises UserError when the data folder cannot be written.
    """
    kinds = [
        Kind("killed at any moment", "SIGKILL after a random time"),
        Kind("killed at an operation", "before one, or in the middle of a write", ("kill", "torn")),
        Kind("power loss", "drops writes and names that were not fsynced", ("unsynced", "lost")),
        Kind("disk full", "one operation fails", ("ENOSPC",)),
    ]
    end = last_line = time.monotonic()
    end += 60 * minutes
    with scratch_folder(settings.data_dir, ".selftest-") as root:
        write_clicks(root)
        seed = random.SystemRandom().randrange(2**32) if seed is None else seed
        chosen, runs = random.Random(seed), Trials(root, tell)
        tell(f"--seed {seed} repeats these trials")
        while kinds[-1].tried < trials or time.monotonic() < end:
            for kind in kinds:
                if complaint := runs.once(kind.modes, chosen):
                    kind.broken.append(complaint)
                    tell(f"BROKEN {kind.fault}: {complaint}")
                kind.tried += 1
                if time.monotonic() - last_line > QUIET_S:
                    last_line = time.monotonic()
                    broken = sum(len(kind.broken) for kind in kinds)
                    tell(f"{sum(kind.tried for kind in kinds)} trials, {broken or 'none'} failed")
    return kinds


class Trials:
    """Breaks runs below `root`, resumes each, and compares it with an undisturbed one."""

    def __init__(self, root: Path, tell: Callable[[str], None]) -> None:
        self._root, self._tell = root, tell
        self._known: dict[str, tuple[dict[str, object], _Ended, float]] = {}

    def once(self, modes: tuple[str, ...], chosen: random.Random) -> str:
        """Break a random run at a random place in one of these modes, and resume it; return what differs from
        an undisturbed run, or "". modes: empty to kill the run after a random time."""
        # All random choices come from `chosen`, always in this order, so that --seed repeats them.
        name = chosen.choice(list(RUNS))
        _, whole, seconds = self._undisturbed(name)
        fault: dict[str, Any]
        if not modes:
            share, codes = chosen.random(), (0, -signal.SIGKILL)
            what, fault = f"killed after {share:.0%}", {"kill_after_s": share * seconds}
        else:
            mode, target = chosen.choice(modes), chosen.randint(1, whole.operations)
            # A missing fsync is a failure even if this trial's power loss would not hit it.
            if mode in ("unsynced", "lost") and whole.unsafe:
                return f"{name}: written or renamed without the fsync it needs: {', '.join(whole.unsafe)}"
            # 0, too: a run may end before the fault, or tolerate an error.
            codes = (0, 2) if mode in ERRORS else (0, KILLED)
            what, fault = f"operation {target}, {mode}", {"target": target, "mode": mode}
        expected = self._undisturbed(name)[0]
        with self._folder() as data_dir:
            hit = self._run(name, data_dir, **fault)
            if hit.code not in codes:
                return f"{name}, {what}: exit code {hit.code}\n{hit.output}"
            resumed = self._run(name, data_dir)
            if resumed.code != 0:
                return f"{name}, {what}: --resume ended with exit code {resumed.code}\n{resumed.output}"
            found = run_results(data_dir)
        differing = [key for key in expected if found[key] != expected[key]]
        return f"{name}, {what}: after --resume these differ: {', '.join(differing)}" if differing else ""

    def _undisturbed(self, name: str) -> tuple[dict[str, object], _Ended, float]:
        if name not in self._known:
            with self._folder() as data_dir:
                started = time.monotonic()
                ended = self._run(name, data_dir)
                assert ended.code == 0, ended.output
                self._known[name] = run_results(data_dir), ended, time.monotonic() - started
            seconds = self._known[name][2]
            self._tell(f"{name}: {ended.operations} file operations, {seconds:.1f} s undisturbed")
        return self._known[name]

    def _run(self, name: str, data_dir: Path, **fault: Any) -> _Ended:
        return run_trial(data_dir, [text.format(folder=self._root) for text in RUNS[name]], **fault)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        # The same path for all runs, because the compared results contain paths.
        folder = self._root / "run"
        folder.mkdir()
        try:
            yield folder / "data"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def table(kinds: list[Kind]) -> str:
    """Return the results as a Markdown table."""
    rows = [("fault", "how", "trials", "shown, with 95 % confidence")]
    rows += [(kind.fault, kind.how, str(kind.tried), kind.shown) for kind in kinds]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
