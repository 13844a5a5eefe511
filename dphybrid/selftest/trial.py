"""One run in a process of its own, under a layer of faults; forked from a process that has imported
everything."""

import os
import re
import sys
import traceback
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sklearn.metrics
import torch
import torch._dynamo

from dphybrid.config.settings import load_settings
from dphybrid.data.table import source as _source  # imported here, not in each trial
from dphybrid.recipes.configs import load_config
from dphybrid.run.folder import all_runs
from dphybrid.run.pages import Report, ResultPage, SplitsPage
from dphybrid.run.train import run_job
from dphybrid.selftest.faults import Faults
from dphybrid.serving import predict as _predict
from dphybrid.tracking import figures
from dphybrid.training.checkpoint import complete_checkpoints, read_state
from dphybrid.util.errors import UserError
from dphybrid.util.files import read_json

torch.set_num_threads(1)
IMPORTED = (_predict, _source, sklearn.metrics, torch._dynamo)
"""What a run imports on its way: here, before the trials are forked."""
NAME = "run"


def run_trial(
    data_dir: Path,
    overrides: list[str],
    target: int = 0,
    mode: str = "kill",
    kill_after_s: float | None = None,
    recorded: bool = False,
    slow_s: float = 0.0,
) -> tuple[int, int, str]:
    """Train, or go on with what there is, and hit operation `target`; return exit code, number of operations,
    and output. kill_after_s: SIGKILL from outside then. recorded: in the embedded MLflow store. slow_s: how
    much longer each fsync takes.

    Exit codes: 0 done, 2 told as UserError, 1 an error that is foreign to the user, 137 killed by itself, -9
    from outside.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    log = data_dir.parent / f"{data_dir.name}.log"
    log.unlink(missing_ok=True)
    child = context.Process(target=_work, args=(data_dir, overrides, target, mode, log, recorded, slow_s))
    child.start()
    if kill_after_s is not None:
        child.join(kill_after_s)
        child.kill()
    child.join(120)
    if child.is_alive():
        child.kill()
        raise TimeoutError(log.read_text(encoding="utf-8"))
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    found = re.search(r"^operations (\d+)$", text, re.MULTILINE)
    return child.exitcode or 0, int(found[1]) if found else 0, text


def _work(
    data_dir: Path, overrides: list[str], target: int, mode: str, log: Path, recorded: bool, slow_s: float
) -> None:
    stream = log.open("w", buffering=1, encoding="utf-8")
    sys.stdout = sys.stderr = stream
    os.environ.update(DPHYBRID_DATA_DIR=str(data_dir), DPHYBRID_TRACKING_URI="none", DPHYBRID_THREADS="1")
    if recorded:
        del os.environ["DPHYBRID_TRACKING_URI"]
    for name in ("MLFLOW_TRACKING_URI", "DPHYBRID_DEVICES", "DPHYBRID_EXPERIMENT"):
        os.environ.pop(name, None)
    os.chdir(data_dir.parent)
    for name in ("rows_per_replica_figure", "stage_figure", "curves_figure"):
        setattr(figures, name, lambda *_: b"")  # pictures take a second, and nothing is recorded here
    faults = Faults(data_dir, target, mode, seed=target, slow_s=slow_s)
    faults.install()
    code = 0
    try:
        settings, config = load_settings(), load_config(None, overrides)
        begun = bool(all_runs(settings))
        run_job(config, settings, run_name=None if begun else NAME, resume="latest" if begun else None)
    except UserError as error:
        print(f"error: {error}")
        code = 2
    except BaseException:  # noqa: BLE001 - told to whoever tries
        traceback.print_exc()
        code = 1
    print(f"operations {faults.count}")
    os._exit(code)


def came_to(data_dir: Path) -> dict[str, Any]:
    """Return what a finished run holds that must not depend on what happened on the way."""
    (folder,) = (path.parent for path in data_dir.glob("runs/*/report.json"))
    report, result = Report.read(folder / "report.json"), ResultPage.read(folder / "result.json")
    splits = SplitsPage.read(folder / "splits.json")
    there = complete_checkpoints(folder / "checkpoints")
    return {
        "metrics": report.metrics,
        "digests": report.digests,
        "history": result.history,
        "best": Path(result.best_checkpoint).name,
        "checkpoints": [path.name for path in there],
        "sums": [read_state(path).sha256 for path in there],
        "splits": [row.model_dump() for row in splits.rows],
        "lines": splits.lines,
        "leftovers": sorted(
            path.name for path in folder.rglob(".*") if path.suffix != ".verified" and path.name != ".lock"
        ),
        "prepared": read_json(next(data_dir.glob("prepared/*/manifest.json")))["arrays"],
    }
