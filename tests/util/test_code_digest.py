"""The digest of a reader's code follows the file of its module."""

import importlib
import sys
from pathlib import Path

import pytest

from dphybrid.config import ExperimentConfig
from dphybrid.util.digests import code_digest


def test_a_changed_file_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    digests = []
    for line in ("number = 1\n", "number = 1\n", "number = 22\n"):
        (tmp_path / "mine_a.py").write_text(f"{line}class Reader:\n    pass\n")
        monkeypatch.delitem(sys.modules, "mine_a", raising=False)
        importlib.invalidate_caches()
        digests.append(code_digest([importlib.import_module("mine_a").Reader]))
    assert digests[0] == digests[1] != digests[2]


def test_code_of_this_package_does_not_count_and_code_without_a_file_does() -> None:
    assert code_digest([ExperimentConfig]) == ""
    digests = []
    for number in (1, 1, 2):
        names: dict[str, object] = {"__name__": "page"}
        exec(f"class Reader:\n    def read(self): return {number}\n", names)
        digests.append(code_digest([names["Reader"]]))
    assert digests[0] == digests[1] != digests[2]
