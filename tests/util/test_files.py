"""Files are there whole or not at all, locks end with their process, pages tell their damage."""

import errno
import importlib
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dphybrid.config import ExperimentConfig
from dphybrid.util.digests import code_digest, value_digest, verify_files
from dphybrid.util.errors import UserError
from dphybrid.util.files import (
    disk_errors_told,
    given_path,
    making,
    read_json,
    remove_folder,
    write_json,
)
from dphybrid.util.locks import is_held, locked, take
from dphybrid.util.pages import Page
from tests.refusing import refused
from tests.reliability.damages import damage


def test_a_path_may_lead_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert given_path("~/none", "data.path") == tmp_path / "none"
    (tmp_path / "file").touch()
    assert given_path("~/file/below", "data.path") == tmp_path / "file" / "below"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.json"
    write_json(file, {"a": "ä"})

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with (
        refused(r"page\.json: No space left on device; make room"),
        disk_errors_told(),
    ):
        write_json(file, {"a": 2})
    assert read_json(file) == {"a": "ä"}
    assert names(tmp_path) == ["page.json"]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "final"

    def fail() -> None:
        with making(final) as partial:
            (partial / "x").write_text("half")
            (partial / "y").unlink()

    with pytest.raises(FileNotFoundError):
        fail()
    assert names(tmp_path) == []
    for text in ("one", "two"):
        with making(final, replace=True) as partial:
            (partial / "x").write_text(text)
        assert names(tmp_path) == ["final"]
        assert (final / "x").read_text() == text
    with pytest.raises(FileExistsError, match="final"), making(final) as partial:
        (partial / "x").write_text("three")
    assert names(tmp_path) == ["final"]
    assert (final / "x").read_text() == "two"
    remove_folder(final)
    assert names(tmp_path) == []


def test_of_many_that_make_one_folder_one_does(tmp_path: Path) -> None:
    def make(number: int) -> int:
        try:
            with making(tmp_path / "final") as partial:
                (partial / "x").write_text(str(number))
        except FileExistsError:
            return -1
        return number

    with ThreadPoolExecutor(8) as pool:
        made = [number for number in pool.map(make, range(40)) if number >= 0]
    assert [str(number) for number in made] == [(tmp_path / "final" / "x").read_text()]
    assert names(tmp_path) == ["final"]


def test_a_lock_ends_with_its_process_and_leaves_the_holders_page(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.write_text("page")
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, b"held" if take(file) is not None else b"free")
        time.sleep(60)
    assert os.read(reading, 4) == b"held"
    assert take(file) is None
    assert is_held(file)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not is_held(file)
    handle = take(file)
    assert handle is not None
    assert take(file) is None  # nor may another thread of this process
    os.close(handle)
    assert file.read_text() == "page"
    with locked(file):
        assert is_held(file)
    assert not file.exists()


class Example(Page):
    name: str
    values: dict[str, float]


def test_a_page_tells_any_damage(tmp_path: Path) -> None:
    file = tmp_path / "example.json"
    Example(name="x", values={"a": 0.1, "b": float("nan")}).write(file)
    assert Example.read(file).values["a"] == 0.1
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        file.write_bytes(damaged)
        with suppress(UserError):  # told; else it was harmless
            read = Example.read(file)
            assert (read.name, read.values["a"]) == ("x", 0.1), bytes(damaged)
    for length in range(len(whole) - 1):
        file.write_bytes(whole[:length])
        with refused("example"):
            Example.read(file)


def test_pages_of_other_versions(tmp_path: Path) -> None:
    file = tmp_path / "example.json"
    write_json(file, {"name": "x", "values": {}})
    with refused("is damaged or was changed by hand"):
        Example.read(file)
    for other in ({"version": 2, "other": 1}, {"version": "1", "name": "x", "values": {}}):
        write_json(file, {**other, "page_sha256": value_digest(other)})
        with refused(r"has version [12].*use the dphybrid that wrote it"):
            Example.read(file)
    write_json(file, {"name": "x", "page_sha256": value_digest({"name": "x"})})
    with refused("does not fit Example: values: is missing"):
        Example.read(file)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").write_text("one")
    sums = {"x": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"}
    verify_files(folder, "page.json", {"sha256": sums}, "")
    damage(folder / "x", b"two")
    with refused(r"x: is damaged \(its checksum differs\); do this"):
        verify_files(folder, "page.json", {"sha256": sums}, "do this")
    damage(folder / "x", b"one")
    for free in (".hidden", "page.json"):
        (folder / free).touch()
    verify_files(folder, "page.json", {"sha256": sums}, "")
    (folder / "y").touch()
    with refused("y: is not listed in page.json, so it is not checked; remove it"):
        verify_files(folder, "page.json", {"sha256": sums}, "")
    (folder / "y").unlink()
    (folder / "x").unlink()
    with refused("x: is missing"):
        verify_files(folder, "page.json", {"sha256": sums}, "do this")


def test_a_changed_file_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    digests = []
    for line in ("number = 1\n", "number = 1\n", "number = 22\n"):
        (tmp_path / "mine_a.py").write_text(f"{line}class Reader:\n    pass\n")
        monkeypatch.delitem(sys.modules, "mine_a", raising=False)
        importlib.invalidate_caches()
        digests.append(code_digest(importlib.import_module("mine_a").Reader))
    assert digests[0] == digests[1] != digests[2]


def test_code_without_a_file_counts_and_this_package_does_not() -> None:
    assert code_digest(ExperimentConfig) == ""
    digests = []
    for number in (1, 1, 2):
        names: dict[str, object] = {"__name__": "page"}
        exec(f"class Reader:\n    def read(self): return {number}\n", names)
        digests.append(code_digest(names["Reader"]))
    assert digests[0] == digests[1] != digests[2]
