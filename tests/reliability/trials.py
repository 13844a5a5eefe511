"""Small runs that a layer of faults breaks: kills, power loss, a full disk. Each is a separate process,
forked from one that has imported everything."""

import gc
import os
import random
import re
import sys
import traceback
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import sklearn.metrics
import torch
import torch.distributed.tensor as _imported_by_torch

from dphybrid.config.settings import load_settings
from dphybrid.data.table import source as _source
from dphybrid.recipes import ctr as _click_models
from dphybrid.recipes.configs import load_config
from dphybrid.run.folder import all_runs
from dphybrid.run.job import run_job
from dphybrid.run.pages import Report, ResultPage
from dphybrid.training.checkpoint import complete_checkpoints, read_state
from dphybrid.util.errors import UserError
from dphybrid.util.files import read_json
from tests.reliability.faults import Faults

torch.set_num_threads(1)
_IMPORTED = (_source, sklearn.metrics, _imported_by_torch, _click_models)
"""Modules that a run imports late. Imported here, so that the forked processes have them."""
gc.freeze()  # or each forked process looks at all of them

SMALL = ["train.epochs=2", "train.log_every=2", "train.patience=0"]
SMALL += ["checkpoint.keep_last=1", "checkpoint.every_steps=2"]
TABLE = ["recipe=ctr", "data.label=clicked", "model.dim=2", "model.hidden=4"]
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
