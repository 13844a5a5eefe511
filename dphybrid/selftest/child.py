"""A function in a process of its own, forked from one that has imported everything: what it returns, or how
it failed."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dphybrid.util.errors import UserError

DONE, FAILED, TOLD = 0, 1, 2
"""Exit codes: it returned; an error that is foreign to the user; an error that is told."""


@dataclass(frozen=True)
class Outcome:
    """code: DONE, FAILED, TOLD, less than 0 for a signal, or None where it took too long. output: what it
    printed, the error last."""

    code: int | None
    value: Any
    output: str


def in_child(
    function: Callable[..., Any], arguments: tuple[Any, ...], scratch: Path, timeout_s: float = 120
) -> Outcome:
    """Call a function of a module, whose value is fit for JSON, with settings of its own and nothing
    recorded. scratch: a folder that is there."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["dphybrid.selftest.trial"])
    log, answer = scratch / "child.log", scratch / "child.json"
    answer.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    child = context.Process(target=_work, args=(function, arguments, log, answer))
    child.start()
    child.join(timeout_s)
    if slow := child.is_alive():
        child.kill()
        child.join()
    output = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    value = json.loads(answer.read_text(encoding="utf-8")) if answer.is_file() else None
    return Outcome(None if slow else child.exitcode, value, output)


def own_settings(data_dir: Path) -> None:
    """Set this process's settings to a data folder and nothing else of the user's."""
    for name in [name for name in os.environ if name.startswith(("DPHYBRID_", "MLFLOW_"))]:
        del os.environ[name]
    os.environ.update(DPHYBRID_DATA_DIR=str(data_dir), DPHYBRID_TRACKING_URI="none", DPHYBRID_THREADS="1")


def _work(function: Callable[..., Any], arguments: tuple[Any, ...], log: Path, answer: Path) -> None:
    sys.stdout = sys.stderr = log.open("w", buffering=1, encoding="utf-8", errors="replace")
    code = DONE
    try:
        answer.write_text(json.dumps(function(*arguments)), encoding="utf-8")
    except UserError as error:
        print(f"error: {error}")
        code = TOLD
    except BaseException:  # noqa: BLE001 - told to whoever tries
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    os._exit(code)
