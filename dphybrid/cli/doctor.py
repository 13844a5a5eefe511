"""`dphybrid doctor`: does this machine have what the project needs? Each line says what was found and, when it is wrong, the remedy."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dphybrid.config.settings import Settings
from dphybrid.gpus import Inventory, lease_folder, visible
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError

PINS = "pip install 'prefect>=3.8.8,<3.10' 'fastapi>=0.139,<0.151' 'sqlalchemy>=2.0,<2.1'"
MAX_SKEW_S = 5.0
"""Seconds by which a server's clock may differ: schedules, leases and heartbeats compare times of several machines."""
ANSWER_S = 5.0
_NETWORK_DISKS = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "beegfs", "9p", "fuse.sshfs")

# Runs in another process: the library itself never imports Prefect, and a broken set of versions fails at import.
_ASK_PREFECT = """
import json, prefect.server.api.server
from prefect.settings import get_current_settings
s = get_current_settings()
auth = s.api.auth_string
print(json.dumps({
    "url": s.api.url, "auth": auth.get_secret_value() if auth else None, "retries": s.client.max_retries,
    "heartbeat_s": s.flows.heartbeat_frequency, "plugins": s.plugins.enabled,
}))
"""


def run_checks(settings: Settings) -> int:
    """Print one line a check; return 0 when all passed, else 1."""
    prefect, facts = _prefect()
    checks: list[Callable[[], tuple[bool, str]]] = [
        _torch,
        lambda: _gpus(settings),
        lambda: _leases(settings),
        lambda: _threads(settings),
        lambda: prefect,
        _sqlalchemy,
        lambda: _prefect_server(facts),
        lambda: _prefect_settings(facts),
        lambda: _mlflow_server(settings),
        lambda: _folder(settings),
        lambda: _shared(settings, facts),
        _secrets,
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


def _gpus(settings: Settings) -> tuple[bool, str]:
    import torch

    inventory = Inventory(settings.nvml)
    units = visible(inventory.read(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if units:
        return True, f"NVML: {len(units)} GPUs are visible ({', '.join(sorted({unit.name for unit in units}))})"
    if torch.cuda.device_count():
        return (
            False,
            f"NVML does not show the GPUs that torch sees ({inventory.reason}): they are used without leases; remedy: update the driver",
        )
    return True, f"NVML: no GPUs ({inventory.reason or 'none is visible'})"


def _leases(settings: Settings) -> tuple[bool, str]:
    try:
        return True, f"leases are kept in {lease_folder(settings.lease_dir)}"
    except UserError as error:
        return False, str(error)


def _threads(settings: Settings) -> tuple[bool, str]:
    cores = len(os.sched_getaffinity(0))
    spec = parse_device_spec(settings.devices)
    units = visible(Inventory(settings.nvml).read(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    runs = max(1, len(units) // max(1, spec.count or 1)) if units else 1
    threads = settings.threads or cores
    if threads * runs > cores and runs > 1:
        return False, (
            f"threads: {runs} runs at once with {threads} threads each, and {cores} cores; set DPHYBRID_THREADS={max(1, cores // runs)}"
        )
    return True, f"threads: {threads} for each of up to {runs} runs at once, {cores} cores"


def _prefect() -> tuple[tuple[bool, str], dict[str, Any]]:
    found = subprocess.run([sys.executable, "-c", _ASK_PREFECT], capture_output=True, text=True, check=False)
    if found.returncode == 0:
        text = f"prefect {version('prefect')} with fastapi {version('fastapi')}: the server can start"
        return (True, text), json.loads(found.stdout.strip().splitlines()[-1])
    last = found.stderr.strip().splitlines()[-1:] or ["no message"]
    return (False, f"prefect.server.api.server cannot be imported: {last[0]}; remedy: {PINS}"), {}


def _sqlalchemy() -> tuple[bool, str]:
    try:
        found = version("sqlalchemy")
    except PackageNotFoundError:
        return False, f"sqlalchemy is not installed; remedy: {PINS}"
    if tuple(int(part) for part in found.split(".")[:2]) >= (2, 1):
        return False, f"sqlalchemy {found}: with 2.1 Prefect 3.8 creates no scheduled runs; remedy: {PINS}"
    return True, f"sqlalchemy {found}: schedules work"


def _prefect_server(facts: dict[str, Any]) -> tuple[bool, str]:
    url = facts.get("url")
    if not url:
        return True, "Prefect server: none is set (PREFECT_API_URL); flows start a temporary one, workers need a real one"
    answer, seconds = _ask(f"{url}/admin/version", facts.get("auth"))
    if isinstance(answer, str):
        return False, f"Prefect server {url}: {answer}; remedy: correct PREFECT_API_URL or PREFECT_API_AUTH_STRING, or start it"
    there = json.loads(answer.read())
    if there != version("prefect"):
        return (
            False,
            f"Prefect server {url} is {there}, here is {version('prefect')}; remedy: install the same version everywhere",
        )
    return _clock(f"Prefect server {url}: the same version", answer, seconds)


def _prefect_settings(facts: dict[str, Any]) -> tuple[bool, str]:
    if not facts.get("url"):
        return True, "Prefect settings for workers: not looked at without a server"
    wanted = {
        "PREFECT_CLIENT_MAX_RETRIES=9": facts["retries"] >= 9,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY=60": facts["heartbeat_s"] is not None and facts["heartbeat_s"] <= 60,
        "PREFECT_PLUGINS_ENABLED=true": facts["plugins"],
    }
    missing = [name for name, good in wanted.items() if not good]
    if missing:
        return (
            False,
            f"Prefect settings: set {', '.join(missing)} (infra/make-env writes them, and prefect.toml has them in this folder)",
        )
    return True, "Prefect settings: outages are waited for, heartbeats are sent, bare deployment names work"


def _mlflow_server(settings: Settings) -> tuple[bool, str]:
    url = settings.mlflow_uri
    if not url or not url.startswith("http"):
        return True, "MLflow server: none is set (MLFLOW_TRACKING_URI)"
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
    answer, seconds = _ask(
        f"{url.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1", f"{user}:{password}" if user else None
    )
    if isinstance(answer, str):
        return False, f"MLflow server {url}: {answer}; remedy: correct MLFLOW_TRACKING_URI, _USERNAME or _PASSWORD, or start it"
    return _clock(f"MLflow server {url}: answers", answer, seconds)


def _ask(url: str, auth: str | None) -> tuple[Any, float]:
    """Return (the answer, or what is wrong; the time when it came)."""
    headers = {"Authorization": "Basic " + base64.b64encode(auth.encode()).decode()} if auth else {}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=ANSWER_S)
    except urllib.error.HTTPError as error:
        return "refuses user and password" if error.code == 401 else f"answers {error.code}", time.time()
    except (OSError, ValueError) as error:
        return f"does not answer ({error})", time.time()
    return answer, time.time()


def _clock(text: str, answer: Any, now: float) -> tuple[bool, str]:
    there = answer.headers.get("Date")
    skew_s = now - parsedate_to_datetime(there).timestamp() if there else 0.0
    if abs(skew_s) > MAX_SKEW_S:
        return (
            False,
            f"{text}, but its clock is {abs(skew_s):.0f} s {'behind' if skew_s > 0 else 'ahead'}; remedy: run an NTP client on both",
        )
    return True, f"{text}, clocks agree"


def _folder(settings: Settings) -> tuple[bool, str]:
    place = _existing(settings.data_dir)
    free_gib = shutil.disk_usage(place).free / 2**30
    if not os.access(place, os.W_OK):
        return False, f"{place} cannot be written; set DPHYBRID_DATA_DIR to a folder of yours"
    return free_gib > 1, f"{settings.data_dir}: {free_gib:.1f} GiB free" + (
        "" if free_gib > 1 else "; set DPHYBRID_DATA_DIR to a larger disk"
    )


def _shared(settings: Settings, facts: dict[str, Any]) -> tuple[bool, str]:
    if not facts.get("url"):
        return True, "checkpoints: of this machine alone"
    place, kind, found = _existing(settings.data_dir), "unknown", ""
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, fs, *_ = line.split()
        if place.is_relative_to(mount) and len(mount) >= len(found):
            kind, found = fs, mount
    if kind.startswith(_NETWORK_DISKS):
        return True, f"checkpoints: on {kind}, which other workstations can see"
    return True, (
        f"checkpoints: on a disk of this machine ({kind}); another workstation can go on with a run only where it sees {settings.data_dir}"
    )


def _secrets() -> tuple[bool, str]:
    folder = Path(os.environ.get("DPHYBRID_ETC", "/etc/dphybrid"))
    try:
        open_files = [str(file) for file in folder.glob("*.*") if file.suffix in (".env", ".ini") and file.stat().st_mode & 0o077]
    except OSError:
        return True, f"secrets: {folder} is closed to this user"
    if open_files:
        return False, f"secrets: others can read {', '.join(open_files)}; remedy: chmod 600"
    return True, f"secrets: no file in {folder} is open to others"


def _existing(place: Path) -> Path:
    while not place.exists():
        place = place.parent
    return place
