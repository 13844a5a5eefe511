"""Check versions, folders and servers.

Each line says what was found and, after BAD, the remedy. The exit code is 1 when a check failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from dphybrid.cli.parser import Parser
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus import Inventory, lease_folder, visible
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.servers import ask, same_clock
from dphybrid.util.shared_files import shared_folder_fault
from dphybrid.util.text import masked

_PINS = "pip install 'prefect>=3.8.8,<3.10' 'fastapi>=0.139,<0.151' 'sqlalchemy>=2.0,<2.1'"
_NETWORK_DISKS = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "beegfs", "9p", "fuse.sshfs")

Check = tuple[bool, str]
"""Whether it passed, and what was found, with its remedy."""


def flags(parser: Parser) -> None:
    """The command has no flags."""


def run(_: argparse.Namespace) -> int:
    """Print one line a check; return 0 when all passed, else 1."""
    settings, passed = load_settings(), True
    for good, text in _checks(settings):
        passed &= good
        print(masked(f"{'ok  ' if good else 'BAD '} {text}"), flush=True)
    where = settings.mlflow_uri or f"embedded, in {settings.mlflow_dir}"
    print(masked(f"     tracking: {where}; experiment {settings.experiment!r}"))
    return 0 if passed else 1


def _checks(settings: Settings) -> Iterator[Check]:
    yield _torch()
    yield _gpus(settings)
    yield _leases(settings)
    yield _threads(settings)
    prefect, with_server = _prefect()
    yield from prefect
    yield _mlflow_server(settings)
    yield _folder(settings)
    yield _shared(settings, with_server)
    yield _data_folder(settings.data_dir)
    yield _secrets()


def _torch() -> Check:
    import torch

    gpus, threads = torch.cuda.device_count(), torch.get_num_threads()
    return True, f"torch {torch.__version__}, {gpus} GPUs, {threads} CPU threads (DPHYBRID_THREADS sets them)"


def _gpus(settings: Settings) -> Check:
    import torch

    inventory = Inventory(settings.nvml)
    if units := visible(inventory.read(), os.environ.get("CUDA_VISIBLE_DEVICES")):
        names = ", ".join(sorted({unit.name for unit in units}))
        return True, f"NVML: {len(units)} GPUs are visible ({names})"
    if torch.cuda.device_count():
        found = f"NVML does not show the GPUs that torch sees ({inventory.reason})"
        return False, f"{found}: they are used without leases; remedy: update the driver"
    return True, f"NVML: no GPUs ({inventory.reason or 'none is visible'})"


def _leases(settings: Settings) -> Check:
    try:
        folder = lease_folder(settings.lease_dir)
    except UserError as error:
        return False, str(error)
    if fault := shared_folder_fault(folder):
        remedy = f"as root `chown root {folder}`, and infra/tmpfiles.d for the next boot"
        return False, f"leases: {fault}; remedy: {remedy}"
    return True, f"leases are kept in {folder}"


def _threads(settings: Settings) -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    spec = parse_device_spec(settings.devices)
    units = visible(Inventory(settings.nvml).read(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    runs = max(1, len(units) // max(1, spec.count or 1)) if units else 1
    threads = settings.threads or cores
    if threads * runs > cores and runs > 1:
        found = f"threads: {runs} runs at once with {threads} threads each, and {cores} cores"
        return False, f"{found}; set DPHYBRID_THREADS={max(1, cores // runs)}"
    return True, f"threads: {threads} for each of up to {runs} runs at once, {cores} cores"


def _prefect() -> tuple[list[Check], bool]:
    """Return the checks of Prefect's half, and whether a server is set."""
    if find_spec("prefect") is None:
        return [(True, "Prefect: not installed (pip install 'dphybrid[flows]' runs flows)")], False
    # By name and in another process: nothing here may need Prefect, and incompatible versions fail at import.
    command = [sys.executable, "-m", "dphybrid.orchestration.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode == 0:
        page = json.loads(done.stdout.strip().splitlines()[-1])
        return [(good, text) for good, text in page["checks"]], page["with_server"]
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return [(False, f"Prefect's server cannot be imported: {last[0]}; remedy: {_PINS}")], False


def _mlflow_server(settings: Settings) -> Check:
    url = settings.mlflow_uri
    if not url or not url.startswith("http"):
        return True, "MLflow server: none is set (MLFLOW_TRACKING_URI)"
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
    page = f"{url.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1"
    answer, now = ask(page, f"{user}:{password}" if user else None)
    if isinstance(answer, str):
        remedy = "correct MLFLOW_TRACKING_URI, _USERNAME or _PASSWORD, or start it"
        return False, f"MLflow server {url}: {answer}; remedy: {remedy}"
    return same_clock(f"MLflow server {url}: answers", answer, now)


def _folder(settings: Settings) -> Check:
    place = _existing(settings.data_dir)
    if not os.access(place, os.W_OK):
        return False, f"{place} cannot be written; set DPHYBRID_DATA_DIR to a folder of yours"
    free_gib = shutil.disk_usage(place).free / 2**30
    remedy = "" if free_gib > 1 else "; set DPHYBRID_DATA_DIR to a larger disk"
    return free_gib > 1, f"{settings.data_dir}: {free_gib:.1f} GiB free{remedy}"


def _shared(settings: Settings, with_server: bool) -> Check:
    if not with_server:
        return True, "checkpoints: of this machine alone"
    place, kind, mount = _existing(settings.data_dir), "unknown", ""
    for disk in psutil.disk_partitions(all=True):
        if place.is_relative_to(disk.mountpoint) and len(disk.mountpoint) >= len(mount):
            kind, mount = disk.fstype, disk.mountpoint
    if kind.startswith(_NETWORK_DISKS):
        return True, f"checkpoints: on {kind}, which other workstations can see"
    limit = f"another workstation can resume a run only where it sees {settings.data_dir}"
    return True, f"checkpoints: on a disk of this machine ({kind}); {limit}"


def _data_folder(folder: Path) -> Check:
    """A folder that is there keeps its mode, for somebody may have meant it."""
    if not folder.is_dir() or not folder.stat().st_mode & 0o077:
        return True, f"data folder: {folder} is closed to others"
    return False, f"data folder: others may enter {folder}; remedy: chmod 700, unless that is meant"


def _secrets() -> Check:
    folder = Path(os.environ.get("DPHYBRID_ETC", "/etc/dphybrid"))
    try:
        files = [file for file in folder.glob("*.*") if file.suffix in (".env", ".ini")]
        readable = [str(file) for file in files if file.stat().st_mode & 0o077]
    except OSError:
        return True, f"secrets: {folder} is closed to this user"
    if readable:
        return False, f"secrets: others can read {', '.join(readable)}; remedy: chmod 600"
    return True, f"secrets: no file in {folder} is open to others"


def _existing(place: Path) -> Path:
    while not place.exists():
        place = place.parent
    return place
