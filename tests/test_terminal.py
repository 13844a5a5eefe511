"""The command in the hands of its surroundings: folders of other accounts, a terminal that closes, a working
folder that is gone."""

import errno
import fcntl
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError
from dphybrid.util.files import disk_errors_told
from dphybrid.util.locks import take
from dphybrid.util.stop import StopRequest, stop_signals
from dphybrid.util.text import printable
from tests.commands import command, python
from tests.refusing import refused

NOBODY = 65534
TRACE = "import pathlib; pathlib.Path({!r}).touch()\n"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="makes files of another account")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of another account, with modules of names that libraries look for, and a `.env`."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("dill", "chardet", "pynvml", "numpy", "rich", "sitecustomize", "yaml", "theirs_nvml"):
        (folder / f"{name}.py").write_text(TRACE.format(str(tmp_path / f"ran-{name}")))
    (folder / ".env").write_text("DPHYBRID_NVML=theirs_nvml\nDPHYBRID_DEVICES=cpu*7\n")
    return folder


@needs_root
def test_nothing_of_another_account_s_folder_is_imported_or_obeyed(
    theirs: Path, tmp_path: Path, data_dir: Path
) -> None:
    for path in (theirs, *theirs.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    argv = ("-m", "dphybrid", "train", "--recipe", "toy", "--train.epochs", "1", "--tracking", "none")
    done = python(*argv, cwd=theirs, env=os.environ | {"PYTHONPATH": ""})
    assert list(tmp_path.glob("ran-*")) == []
    assert "cpu*7" not in done.stdout + done.stderr


def test_a_recipe_of_the_working_folder_is_found_where_it_is_named(tmp_path: Path, data_dir: Path) -> None:
    (tmp_path / "helper_of_mine.py").write_text("WIDTH = 3\n")
    (tmp_path / "my_recipe.py").write_text(
        "from dphybrid.tutorials import Toy\nimport helper_of_mine\nclass Mine(Toy):\n    name = 'mine'\n"
    )
    done = python("-m", "dphybrid", "train", "--help", "--recipe", "my_recipe:Mine", cwd=tmp_path)
    assert "--train.epochs" in done.stdout
    assert "no module named" in command("prepare", "--recipe", "elsewhere:Mine", ends=2)


def test_a_working_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    code = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m dphybrid train --recipe toy"
    done = subprocess.run(["sh", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    told = "error: the working folder was removed; change to one that exists (cd)\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    "name",
    ["THREADS", "GPU_WAIT_S", "CLUSTER_TIMEOUT_S"],
)
def test_a_setting_beyond_what_the_system_takes_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DPHYBRID_{name}", "1" + "0" * 20)
    with refused(f"DPHYBRID_{name} = '100000000000000000000': must be less than or equal to"):
        load_settings()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOLCK, "no file locks: name a folder on a local disk"),
        (errno.ENOSPC, "make room on its disk"),
    ],
)
def test_a_file_system_without_locks_is_said(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(UserError) as caught, disk_errors_told():
        take(tmp_path / "lock")
    assert str(tmp_path / "lock") in str(caught.value)
    assert remedy in str(caught.value)
    monkeypatch.setenv("DPHYBRID_DATA_DIR", str(tmp_path / "data"))
    told = command("prepare", "--recipe", "toy", ends=2)
    assert remedy in told
    assert ("make room" in told) == (number == errno.ENOSPC)


HOSTILE = "co\x1b]8;;http://evil\x07l\u202e\x9bm"
SAFE = "co\\x1b]8;;http://evil\\x07l\\u202e\\x9bm"


def test_names_in_a_table_are_printed_escaped(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "none")
    assert printable(HOSTILE + "\n\t\u200dé") == SAFE + "\n\t\u200dé"
    rows = [f"{'ab'[i % 2]}\x1b[2J,{i},{('no', HOSTILE)[i % 2]}" for i in range(60)]
    (tmp_path / "table.csv").write_text(
        "\n".join([f"{HOSTILE},number,label", *rows]) + "\n", encoding="utf-8"
    )
    table = ["--data.path", str(tmp_path / "table.csv"), "--data.label", "label"]
    printed = [
        command("prepare", *table),
        command("train", *table, "--train.epochs", "1", "--run-name", "run"),
        command("prepare", *table, "--data.numeric", f"{HOSTILE}x", ends=2),
        command("prepare", "--data.path", str(tmp_path / "table.csv"), "--data.label", HOSTILE + "l", ends=2),
        command("prepare", "--recipe", HOSTILE, ends=2),
        command("prepare", f"--{HOSTILE}", "1", ends=2),
        command("predict", "run", "--data.path", f"{tmp_path}/{HOSTILE}.csv", ends=2),
    ]
    for text in printed:
        assert printable(text) == text
    assert SAFE in printed[0] + printed[2]


@pytest.mark.nightly
@pytest.mark.parametrize("second", [True, False])
def test_a_terminal_that_closes_is_a_request_to_stop(
    second: bool, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """second: the shell sends SIGHUP to its jobs besides the kernel."""
    if not second:  # else the run must still be busy with its end
        monkeypatch.setenv("DPHYBRID_TRACKING_URI", "none")
    own, theirs = pty.openpty()
    argv = [sys.executable, "-P", "-m", "dphybrid", "train", "--recipe", "toy", "--run-name", "run"]
    argv += ["--train.epochs", "100000", "--train.patience", "0", "--train.print-splits", "each"]

    def lead() -> None:
        os.setsid()
        fcntl.ioctl(0, 0x540E, 0)  # TIOCSCTTY: this terminal's closing sends SIGHUP here

    child = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lead)
    os.close(theirs)
    seen = b""
    while seen.count(b"epoch") < 3:
        seen += os.read(own, 65536)
    os.close(own)
    if second:
        child.send_signal(signal.SIGHUP)
        time.sleep(0.05)
        child.send_signal(signal.SIGHUP)
    assert child.wait(60) == 128 + signal.SIGHUP
    checkpoints = sorted((data_dir / "runs" / "run" / "checkpoints").glob("step-*"))
    assert checkpoints
    told = command("train", "--resume", "run", "--train.epochs", "1")
    assert f"Resuming from {checkpoints[-1]}" in told


def test_only_a_second_ctrl_c_or_sigterm_hurries() -> None:
    stop = StopRequest()
    with stop_signals(stop):
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stop.pending
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
