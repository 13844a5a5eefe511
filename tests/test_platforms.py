"""What works on Windows and macOS, too: run there as it stands, on Linux with what these lack taken away."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dphybrid.util import system
from dphybrid.util.locks import FileLock, is_held, locked
from tests.as_windows import rows, train_and_predict
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.platform


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stands in for Windows")
def test_without_what_windows_lacks_everything_imports_and_training_gives_the_same(data_dir: Path) -> None:
    expected = train_and_predict()
    there = data_dir / "there"
    there.mkdir()
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-m", "tests.as_windows", str(there)],
        cwd=REPOSITORY,
        env={**os.environ, "DPHYBRID_DATA_DIR": str(there)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kept"]
    assert found["modules"] > 200
    assert all("WSL 2" in said for said in found["refused"])
    assert len(found["refused"]) == 3
    assert found["metrics"] == expected["metrics"]
    assert found["predicted"] == expected["predicted"]


def test_a_table_is_trained_and_predicted(data_dir: Path) -> None:
    found = train_and_predict()
    assert found["metrics"]["auc"] > 0.5
    assert len(found["predicted"]) == len(rows(2))


def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    code = (
        "import sys, time; from pathlib import Path; from dphybrid.util.locks import FileLock;"
        "print(FileLock(Path(sys.argv[1])).acquire(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert not FileLock(file).acquire()
        assert is_held(file)
        child.kill()
        child.wait(60)
    assert not is_held(file)
    with locked(file):
        assert is_held(file)
        assert not FileLock(file).acquire()
    assert not file.exists()


def test_cores_are_counted_where_the_system_tells_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= system.num_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert system.num_cores() == os.cpu_count()
