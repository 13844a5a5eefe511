"""Locks of the kernel."""

import subprocess
import sys
from pathlib import Path

from dphybrid.util.locks import FileLock, is_held, locked


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
