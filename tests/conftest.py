"""Shared by all tests: one torch thread, a home, data folders, groups that share servers, nightly tests."""

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parent.parent
SHARED = REPOSITORY.parent / "shared"
LONG = bool(os.environ.get("DPHYBRID_LONG_TESTS"))
"""Whether the nightly tests run, too."""

SERVERS = {
    "flows/test_{}.py": ("deployments", "workers"),
    "flows/test_{}_hybrid.py": ("retrain", "sweep", "train"),
    "tracking/test_{}.py": ("outage", "secrets"),
}
"""Files whose tests share servers. One process runs them, as it runs the tests of a file, so that servers and
models of a fixture are made once."""

USED = [f"DPHYBRID_{name}" for name in ("TRACKING_URI", "DEVICES", "EXPERIMENT")]
"""Variables that commands set in their own process."""

HOMES = {"PREFECT_HOME": "prefect", "DPHYBRID_DATA_DIR": "data"}
"""Variables of folders that are otherwise in the user's home, and their names in the tests' home."""

torch.set_num_threads(1)
# Compile once: each of the many programs that tests start would compile the package anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
# A shell ignores SIGINT for background commands, and nohup SIGHUP. The programs that tests start would
# inherit that, and signals to them would have no effect.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_configure(config: pytest.Config) -> None:
    """Give all tests one new home and no server. The processes of xdist inherit it from the first one."""
    if hasattr(config, "workerinput"):
        return
    home = Path(tempfile.mkdtemp(prefix="dphybrid-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    os.environ.update({variable: str(home / folder) for variable, folder in HOMES.items()})
    for variable in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        os.environ.pop(variable, None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the nightly tests. Groups with slow tests come first, so that the processes end at about the same
    time."""
    for item in items:
        if item.get_closest_marker("nightly") and not LONG:
            item.add_marker(pytest.mark.skip(reason="nightly: set DPHYBRID_LONG_TESTS=1"))
    slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: group_of(item.nodeid) not in slow)


def group_of(test: str) -> str:
    """Return the group of a test: its file, or the first of those that share its servers."""
    file = test.partition("::")[0]
    for path, names in SERVERS.items():
        files = [f"tests/{path.format(name)}" for name in names]
        if file in files:
            return files[0]
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a process whole groups. (With pytest 9.2, xdist 3.8 does not see the groups of its own marker.)"""
    from xdist.scheduler import LoadScopeScheduling

    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = group_of
    return scheduling


@pytest.fixture(scope="session", autouse=True)
def _stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make new databases of this process by copying a finished one. For programs that a test starts, the copy
    must be in place before (`embedded_store`). Tables and blocks are tested without pydantic, too, where
    nothing is recorded."""
    if importlib.util.find_spec("pydantic") is None:
        yield
        return
    from dphybrid.tracking import opening
    from tests import stores

    base = tmp_path_factory.getbasetemp()
    stores.keep_in(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "make_database", stores.make_database)
        yield


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collection, which every training run triggers."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Exempt all objects from garbage collection at the end: pytest collects five times, and execnet
    interrupts a worker that takes more than five seconds to end."""
    gc.freeze()


def own_settings(patch: pytest.MonkeyPatch, data_dir: Path, **values: str) -> None:
    """Remove the caller's settings; set a data folder, one thread, and more settings by name."""
    for name in [name for name in os.environ if name.startswith(("DPHYBRID_", "MLFLOW_TRACKING"))] + USED:
        # setenv first, so that `patch` also removes at the end a value that a command has set meanwhile.
        patch.setenv(name, "")
        patch.delenv(name)
    for name, value in {"DATA_DIR": str(data_dir), "THREADS": "1", **values}.items():
        patch.setenv(f"DPHYBRID_{name}", value)


def _with_own_variables() -> Iterator[None]:
    """Undo what commands and workers, run in this process, set in its environment."""
    before = {name: value for name, value in os.environ.items() if name.startswith("DPHYBRID_")}
    yield
    for name in [name for name in os.environ if name.startswith("DPHYBRID_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


_of_a_module = pytest.fixture(scope="module", autouse=True)(_with_own_variables)
_of_a_test = pytest.fixture(autouse=True)(_with_own_variables)


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder for this test, without the caller's settings."""
    own_settings(monkeypatch, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


@pytest.fixture
def embedded_store(data_dir: Path) -> None:
    """Put a finished database of MLflow's embedded store in place, for programs that a test starts."""
    from tests import stores

    stores.put_database("mlflow", data_dir / "mlflow" / "mlflow.db")


@pytest.fixture
def unrecorded(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record no runs, for tests of the training itself."""
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "none")


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that is no child of this one."""
    code = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True, "
        "stdout=-3, stderr=-3).pid)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid = int(ran.stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)
