"""`dphybrid doctor`: does this machine have what the project needs? Each line says what was found and, when it is wrong, the remedy."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from dphybrid.settings import Settings

PINS = "pip install 'prefect>=3.8.8,<3.10' 'fastapi>=0.139,<0.151' 'sqlalchemy>=2.0,<2.1'"


def run_checks(settings: Settings) -> int:
    """Print one line a check; return 0 when all passed, else 1."""
    checks: list[Callable[[], tuple[bool, str]]] = [
        _torch,
        lambda: _server("prefect.server.api.server"),
        _sqlalchemy,
        lambda: _folder(settings),
    ]
    passed = True
    for check in checks:
        good, text = check()
        passed &= good
        print(f"{'ok  ' if good else 'BAD '} {text}", flush=True)
    print(
        f"     tracking: {settings.mlflow_uri or 'embedded, in ' + str(settings.mlflow_dir)}; experiment {settings.experiment!r}"
    )
    return 0 if passed else 1


def _torch() -> tuple[bool, str]:
    import torch

    gpus = torch.cuda.device_count()
    return True, f"torch {torch.__version__}, {gpus} GPUs, {torch.get_num_threads()} CPU threads (DPHYBRID_THREADS sets them)"


def _server(module: str) -> tuple[bool, str]:
    # In another process: the library itself never imports Prefect, and a broken set of versions fails at import.
    found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return True, f"prefect {version('prefect')} with fastapi {version('fastapi')}: the server can start"
    last = found.stderr.strip().splitlines()[-1:] or ["no message"]
    return False, f"{module} cannot be imported: {last[0]}; remedy: {PINS}"


def _sqlalchemy() -> tuple[bool, str]:
    try:
        found = version("sqlalchemy")
    except PackageNotFoundError:
        return False, f"sqlalchemy is not installed; remedy: {PINS}"
    if tuple(int(part) for part in found.split(".")[:2]) >= (2, 1):
        return False, f"sqlalchemy {found}: with 2.1 Prefect 3.8 creates no scheduled runs; remedy: {PINS}"
    return True, f"sqlalchemy {found}: schedules work"


def _folder(settings: Settings) -> tuple[bool, str]:
    place = settings.data_dir
    while not place.exists():
        place = place.parent
    free_gib = shutil.disk_usage(place).free / 2**30
    if not os.access(place, os.W_OK):
        return False, f"{place} cannot be written; set DPHYBRID_DATA_DIR to a folder of yours"
    return free_gib > 1, f"{settings.data_dir}: {free_gib:.1f} GiB free" + (
        "" if free_gib > 1 else "; set DPHYBRID_DATA_DIR to a larger disk"
    )
