"""The folder of prepared data: complete or not there, made once, told about."""

import errno
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dphybrid.data import open_prepared, store, verify_prepared
from dphybrid.data.store import Content, build_once
from dphybrid.util.errors import UserError
from tests.commands import python
from tests.preparing import from_file, prepare
from tests.refusing import refused


def small(_: Path) -> Content:
    arrays = {"x_B": np.arange(3), "train_rows": np.arange(2), "valid_rows": np.array([2])}
    return Content(arrays, {}, ["  x"], ("x_B",))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_threads_that_fail_one_after_the_other_never_build_at_once(tmp_path: Path) -> None:
    """The lock file is removed by each holder while others wait for it: still only one may build."""
    inside, most, failures = 0, 0, 0
    count = threading.Lock()

    def make(_: Path) -> Content:
        nonlocal inside, most, failures
        with count:
            inside += 1
            most = max(most, inside)
            fail = failures < 5
            failures += fail
        time.sleep(0.01)
        with count:
            inside -= 1
        if fail:
            raise UserError("no")
        return small(tmp_path)

    reused: list[bool | None] = []

    def work() -> None:
        try:
            reused.append(build_once(tmp_path, "x", "0" * 64, make).reused)
        except UserError:
            reused.append(None)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1
    assert sorted(map(str, reused)) == ["False"] + ["None"] * 5 + ["True"] * 6
    assert names(tmp_path) == ["x-000000000000"]


def test_what_a_killed_preparation_left_is_cleared_away(tmp_path: Path) -> None:
    def build_and_die() -> None:
        store.sync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        build_once(tmp_path, "x", "0" * 64, small)

    with warnings.catch_warnings(action="ignore"):  # other threads, of which the child has none
        child = multiprocessing.get_context("fork").Process(target=build_and_die)
        child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert any("partial" in name for name in names(tmp_path))
    assert not build_once(tmp_path, "x", "0" * 64, small).reused
    assert names(tmp_path) == ["x-000000000000"]


def test_a_damaged_folder_is_told_and_not_used(tmp_path: Path) -> None:
    path = build_once(tmp_path, "x", "0" * 64, small).path
    array = path / "x_B.npy"
    whole = array.read_bytes()
    np.save(array, np.arange(3).astype(np.float64))
    header = "is damaged"
    for content, words in (
        (array.read_bytes(), header),
        (whole[:6] + b"\x41" + whole[7:], header),
        (whole.replace(b"False", b"True "), header),
        (whole[:-1], "has "),
        (None, "has "),
    ):
        array.unlink() if content is None else array.write_bytes(content)
        with refused(rf"x_B\.npy: {words}.* delete the folder"):
            build_once(tmp_path, "x", "0" * 64, small)
    for text in ("", "[]", "{}", '{"arrays": {"x_B": {}}}'):
        (path / "manifest.json").write_text(text)
        with refused("is not complete prepared data .* delete the folder"):
            open_prepared(path)
    with refused("is not complete prepared data"):
        open_prepared(tmp_path / "nowhere")


def test_any_damage_is_found(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("n,a,y\n" + "\n".join(f"{i * i},v{i % 9},{i % 2}" for i in range(60)))
    path = from_file(file, min_count=1).path
    verify_prepared(path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    pages = {"manifest.json", "encoder.json", "vocabularies.parquet"}
    assert pages < {file.name for file in files}
    for file in files:
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 3)):
            damaged = bytearray(whole)
            damaged[place] ^= 1
            file.write_bytes(damaged)
            with refused(file.name):
                verify_prepared(path)
        file.unlink()
        with refused(file.name):
            verify_prepared(path)
        file.write_bytes(whole)
    verify_prepared(path)


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with refused("cannot be made there.*DPHYBRID_DATA_DIR"):
        prepare("toy", None, tmp_path / "file", 0)


def test_a_table_that_finds_no_room_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk, while columns are read and while arrays are written: a
    column of numbers takes 24,000 bytes, the ids 48,000."""
    file, span = tmp_path / "x.parquet", range(3000)
    texts = {name: [f"{name}{i % size}" for i in span] for name, size in (("a", 900), ("b", 3), ("c", 4))}
    pl.DataFrame({"n": [i * i for i in span], **texts, "y": [i % 2 for i in span]}).write_parquet(file)
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom tests.preparing import from_file\n"
        "for limit in (2_000, 30_000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    try: from_file(Path(sys.argv[1]), min_count=1)\n"
        "    except ValueError as error: print(type(error).__name__, error)"
    )
    told = python("-c", code, file).stdout.splitlines()
    assert len(told) == 2
    for line in told:
        assert re.search("^UserError .*prepared data cannot be made there.*File too large", line)
    assert names(tmp_path / "prepared") == []


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("n,y\n" + "\n".join(f"{i * i},{i % 2}" for i in range(30)))

    def grow(what: str, done: int, total: int) -> None:
        if what == "encode columns":
            file.write_text("n,y\n1,1\n")

    with refused("changed while it was read"):
        from_file(file, on_progress=grow)
    assert names(tmp_path / "prepared") == []


def test_files_that_cannot_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.csv"
    file.write_text("n,y\n1,1\n2,0\n")
    opened = Path.open

    def forbid(path: Path, *args: object, **kwargs: object) -> object:
        if path == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", forbid)
    with refused(r"x\.csv cannot be read: Permission denied; check its permissions"):
        from_file(file)


def test_progress_is_told_and_ends_complete(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a,b,y\n" + "\n".join(f"{i * i},{i % 3},{i % 2}" for i in range(30)))
    calls: list[tuple[str, int, int]] = []
    from_file(file, on_progress=lambda *call: calls.append(call))
    assert list(dict.fromkeys(call[0] for call in calls)) == ["digest files", "read rows", "encode columns"]
    assert calls[-1] == ("encode columns", 2, 2)
    assert all(0 <= done <= total for _, done, total in calls)
