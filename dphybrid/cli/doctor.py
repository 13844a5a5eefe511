"""`dphybrid doctor`: does this machine have what the project needs? Each line says what was found and, when
it is wrong, the remedy."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from dphybrid.config.settings import Settings
from dphybrid.gpus import Inventory, lease_folder, visible
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.masking import masked
from dphybrid.util.servers import ask, same_clock
from dphybrid.util.shared_files import shared_folder_fault
from dphybrid.util.system import num_cores

PINS = "pip install 'prefect>=3.8.8,<3.10' 'fastapi>=0.139,<0.151' 'sqlalchemy>=2.0,<2.1'"
_NETWORK_DISKS = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "beegfs", "9p", "fuse.sshfs")


def run_checks(settings: Settings) -> int:
    """Print one line a check; return 0 when all passed, else 1."""
    prefect, with_server = _prefect()
    checks: list[Callable[[], tuple[bool, str]]] = [
        _torch,
        lambda: _gpus(settings),
        lambda: _leases(settings),
        lambda: _threads(settings),
        *(lambda result=result: result for result in prefect),
        lambda: _mlflow_server(settings),
        lambda: _folder(settings),
        lambda: _shared(settings, with_server),
        _secrets,
    ]
    passed = True
    for check in checks:
        good, text = check()
        passed &= good
        print(masked(f"{'ok  ' if good else 'BAD '} {text}"), flush=True)
    where = settings.mlflow_uri or f"embedded, in {settings.mlflow_dir}"
    print(masked(f"     tracking: {where}; experiment {settings.experiment!r}"))
    return 0 if passed else 1


def _torch() -> tuple[bool, str]:
    import torch

    gpus = torch.cuda.device_count()
    return (
        True,
        f"torch {torch.__version__}, {gpus} GPUs, {torch.get_num_threads()} CPU threads (DPHYBRID_THREADS "
        "sets them)",
    )


def _gpus(settings: Settings) -> tuple[bool, str]:
    import torch

    inventory = Inventory(settings.nvml)
    units = visible(inventory.read(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if units:
        return (
            True,
            f"NVML: {len(units)} GPUs are visible ({', '.join(sorted({unit.name for unit in units}))})",
        )
    if torch.cuda.device_count():
        return (
            False,
            f"NVML does not show the GPUs that torch sees ({inventory.reason}): they are used without "
            "leases; remedy: update the driver",
        )
    return True, f"NVML: no GPUs ({inventory.reason or 'none is visible'})"


def _leases(settings: Settings) -> tuple[bool, str]:
    try:
        folder = lease_folder(settings.lease_dir)
    except UserError as error:
        return False, str(error)
    if fault := shared_folder_fault(folder):
        return (
            False,
            f"leases: {fault}; remedy: as root `chown root {folder}`, and infra/tmpfiles.d for the next boot",
        )
    return True, f"leases are kept in {folder}"


def _threads(settings: Settings) -> tuple[bool, str]:
    cores = num_cores()
    spec = parse_device_spec(settings.devices)
    units = visible(Inventory(settings.nvml).read(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    runs = max(1, len(units) // max(1, spec.count or 1)) if units else 1
    threads = settings.threads or cores
    if threads * runs > cores and runs > 1:
        return False, (
            f"threads: {runs} runs at once with {threads} threads each, and {cores} cores; set "
            f"DPHYBRID_THREADS={max(1, cores // runs)}"
        )
    return True, f"threads: {threads} for each of up to {runs} runs at once, {cores} cores"


def _prefect() -> tuple[list[tuple[bool, str]], bool]:
    """Return the checks of Prefect's half, and whether a server is set."""
    # By name and in another process: nothing here may need Prefect, and a broken set of versions fails at
    # import.
    command = [sys.executable, "-m", "dphybrid.orchestration.doctor"]
    found = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if found.returncode == 0:
        page = json.loads(found.stdout.strip().splitlines()[-1])
        return [(good, text) for good, text in page["checks"]], page["with_server"]
    last = found.stderr.strip().splitlines()[-1:] or ["no message"]
    return [(False, f"Prefect's server cannot be imported: {last[0]}; remedy: {PINS}")], False


def _mlflow_server(settings: Settings) -> tuple[bool, str]:
    url = settings.mlflow_uri
    if not url or not url.startswith("http"):
        return True, "MLflow server: none is set (MLFLOW_TRACKING_URI)"
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
    answer, now = ask(
        f"{url.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1",
        f"{user}:{password}" if user else None,
    )
    if isinstance(answer, str):
        return (
            False,
            f"MLflow server {url}: {answer}; remedy: correct MLFLOW_TRACKING_URI, _USERNAME or _PASSWORD, "
            "or start it",
        )
    return same_clock(f"MLflow server {url}: answers", answer, now)


def _folder(settings: Settings) -> tuple[bool, str]:
    place = _existing(settings.data_dir)
    free_gib = shutil.disk_usage(place).free / 2**30
    if not os.access(place, os.W_OK):
        return False, f"{place} cannot be written; set DPHYBRID_DATA_DIR to a folder of yours"
    return free_gib > 1, f"{settings.data_dir}: {free_gib:.1f} GiB free" + (
        "" if free_gib > 1 else "; set DPHYBRID_DATA_DIR to a larger disk"
    )


def _shared(settings: Settings, with_server: bool) -> tuple[bool, str]:
    if not with_server:
        return True, "checkpoints: of this machine alone"
    place, kind, found = _existing(settings.data_dir), "unknown", ""
    for disk in psutil.disk_partitions(all=True):
        if place.is_relative_to(disk.mountpoint) and len(disk.mountpoint) >= len(found):
            kind, found = disk.fstype, disk.mountpoint
    if kind.startswith(_NETWORK_DISKS):
        return True, f"checkpoints: on {kind}, which other workstations can see"
    return True, (
        f"checkpoints: on a disk of this machine ({kind}); another workstation can go on with a run only "
        f"where it sees {settings.data_dir}"
    )


def _secrets() -> tuple[bool, str]:
    folder = Path(os.environ.get("DPHYBRID_ETC", "/etc/dphybrid"))
    try:
        open_files = [
            str(file)
            for file in folder.glob("*.*")
            if file.suffix in (".env", ".ini") and file.stat().st_mode & 0o077
        ]
    except OSError:
        return True, f"secrets: {folder} is closed to this user"
    if open_files:
        return False, f"secrets: others can read {', '.join(open_files)}; remedy: chmod 600"
    return True, f"secrets: no file in {folder} is open to others"


def _existing(place: Path) -> Path:
    while not place.exists():
        place = place.parent
    return place
