"""Check versions, GPUs, folders and servers.

Each line is one check: ok, or BAD with the remedy. The exit code is 1 when a check failed.
"""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain

from dphybrid.cli.parser import Command, prefect_part
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus.inventory import Inventory, visible, why_cpu
from dphybrid.tracking.opening import checked
from dphybrid.util.asking import ask
from dphybrid.util.errors import UserError, counted
from dphybrid.util.text import masked

_PINS = "pip install 'prefect>=3.8.8,<3.10' 'fastapi>=0.139,<0.151' 'sqlalchemy>=2.0.16,<2.1'"
"""The remedy: the versions of the extra `flows` in pyproject.toml."""
_Check = tuple[bool, str]
"""(whether the check passed, the finding with its remedy)"""


class Flags(Command):
    """The command has no flags."""

    def run(self) -> int:
        """Print one line per check; return 0 when all passed, else 1."""
        settings, passed = load_settings(), True
        mlflow = checked(settings.mlflow_uri, settings.mlflow_dir)
        for good, text in chain(_gpus(settings), _prefect(), [mlflow], _data_folder(settings)):
            passed &= good
            print(masked(f"{'ok  ' if good else 'BAD '} {text}"), flush=True)
        return 0 if passed else 1


def _gpus(settings: Settings) -> Iterator[_Check]:
    import torch

    threads = torch.get_num_threads()
    yield True, f"torch {torch.__version__}, {threads} CPU threads (DPHYBRID_THREADS sets them)"
    inventory = Inventory(settings.nvml)
    units = visible(inventory.read())
    for unit in units:
        if unit.fault:
            yield False, f"{unit.label}: {unit.fault}"
    if why := why_cpu(inventory, units, settings):
        remedy = "remedy: `nvidia-smi` should list the GPUs; update the driver and reboot, or reinstall torch"
        yield False, f"GPUs: {why}; devices=auto takes the CPU; {remedy}"
    elif units:
        names = ", ".join(sorted({unit.name for unit in units if unit.name}))
        yield True, f"NVML: {counted(len(units), 'GPU')} visible ({names})"
    elif torch.cuda.device_count():
        # torch trains on them all the same, but nobody else sees that they are taken.
        found = f"NVML does not show the GPUs that torch sees ({inventory.reason})"
        yield False, f"{found}: they are used without leases; remedy: update the driver"
    else:
        yield True, f"NVML: no GPUs ({inventory.reason or 'none is visible'})"


def _prefect() -> Iterator[_Check]:
    if find_spec("prefect") is None:
        yield True, "Prefect: not installed (pip install 'dphybrid[flows]' runs flows)"
        return
    try:
        checks = prefect_part("doctor").checks
    except UserError as error:  # names the setting of Prefect's that is wrong
        yield False, str(error)
    except Exception as error:  # noqa: BLE001 - incompatible versions fail in many ways when imported
        why = f"{type(error).__name__}: {error}"
        yield False, f"Prefect's server cannot be imported: {why}; remedy: {_PINS}"
    else:
        yield from checks(ask)


def _data_folder(settings: Settings) -> Iterator[_Check]:
    existing = folder = settings.data_dir
    # The folder may not exist yet; then its nearest existing parent decides whether it can be made.
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        yield False, f"{existing} cannot be written; set DPHYBRID_DATA_DIR to a folder of yours"
    free_gib = shutil.disk_usage(existing).free / 2**30
    remedy = "" if free_gib > 1 else "; set DPHYBRID_DATA_DIR to a larger disk"
    yield free_gib > 1, f"{folder}: {free_gib:.1f} GiB free{remedy}"
    # Reported, not corrected: the user may have opened an existing folder on purpose.
    if folder.is_dir() and folder.stat().st_mode & 0o077:
        yield False, f"data folder: others may enter {folder}; remedy: chmod 700, unless that is intended"
    else:
        yield True, f"data folder: {folder} is closed to others"
