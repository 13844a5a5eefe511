"""Faults planted in the code that keeps files: tests find each of them.

The list is compared with the product in each run, so that it does not go stale; DPHYBRID_LONG_TESTS=1 plants
each fault in a copy and runs its test there, which must fail.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.commands import python
from tests.conftest import LONG, REPOSITORY

CRASHES, FILES = "tests/util/test_crashes.py", "tests/util/test_files.py"
ROWS, LOOKUPS = "tests/training/test_changed_rows.py", "tests/training/test_tensor_file.py"
STORE, KEPT = "tests/data/test_store.py", "tests/training/test_retention.py"
PLANTED = {
    "a file is not fsynced": ("util/files", "os.fsync(stream.fileno())", "pass", CRASHES),
    "a file is fsynced before it is flushed": ("util/files", "stream.flush()", "pass", CRASHES),
    "a file's name is not fsynced": (
        "util/files",
        "partial.replace(path)\n            sync(path.parent)",
        "partial.replace(path)",
        CRASHES,
    ),
    "a file is renamed before it is written": (
        "util/files",
        "                stream.write(content)\n",
        "                os.link(partial, path.with_suffix('.now'))\n"
        "                os.replace(path.with_suffix('.now'), path)\n                stream.write(content)\n",
        CRASHES,
    ),
    "a folder is not fsynced": ("util/files", "            _sync_tree(partial)\n", "", CRASHES),
    "a folder's files are not fsynced": (
        "util/files",
        "        sync(path)\n    sync(folder)",
        "        pass",
        CRASHES,
    ),
    "a folder's name is not fsynced": ("util/files", "            sync(final.parent)\n", "", CRASHES),
    "a folder is removed before the new one is there": (
        "util/files",
        "final.rename(before)",
        "shutil.rmtree(final)",
        CRASHES,
    ),
    "a replaced folder does not come back": (
        "util/files",
        'match["kind"] == "replaced" and',
        "False and",
        CRASHES,
    ),
    "a folder is removed under its name": (
        "util/files",
        "folder.rename(gone)",
        "shutil.rmtree(folder)",
        CRASHES,
    ),
    "a removal is not fsynced": ("util/files", "        sync(gone.parent)\n", "", CRASHES),
    "a new folder's name is not fsynced": ("util/files", "        sync(folder.parent)\n", "", CRASHES),
    "a file's checksum is not compared": ("util/digests", "    if found != wanted:", "    if False:", FILES),
    "a page's checksum is not compared": ("util/pages", "!= value_digest(values)", "is None", FILES),
    "prepared data is not verified": (
        "data/store",
        "    verify_files(path, {",
        "    (path, {",
        STORE,
    ),
    "a block's checksum is not compared": (
        "training/tensor_file",
        "block_sum(self._content[start:end].data) != self._wanted[block]",
        "False",
        LOOKUPS,
    ),
    "a row's first block alone is checked": (
        "training/tensor_file",
        "(*range(0, row_bytes, BLOCK), row_bytes - 1)",
        "(0,)",
        LOOKUPS,
    ),
    "rows are not checked": (
        "embedding/native",
        "    check_read(rows, flat_N)\n    return out_XD",
        "    return out_XD",
        LOOKUPS,
    ),
    "bags are not checked": (
        "embedding/table",
        "            native.check_read(weight.data_ptr(), ids_N)\n",
        "            pass\n",
        LOOKUPS,
    ),
    "a table is copied unchecked": (
        "embedding/table",
        "        self.settled()\n        return self.__dict__",
        "        return self.__dict__",
        LOOKUPS,
    ),
    "all checkpoints share one file": (
        "training/saving",
        "if len(wanted) > 1 and",
        "if False and",
        f"{ROWS}::test_a_checkpoint_needs_no_other_folder_and_another_full_one_stays",
    ),
    "checkpoints are in the order of texts": (
        "training/checkpoint",
        "sorted(there, key=step_of)",
        "sorted(there)",
        KEPT,
    ),
}
"""Fault -> module, its text, the text that takes its place, the test that finds it."""


def planted(fault: str) -> str:
    """Return a module's text with a fault in it."""
    module, text, instead, _ = PLANTED[fault]
    source = (REPOSITORY / "dphybrid" / f"{module}.py").read_text(encoding="utf-8")
    assert source.count(text) == 1, fault
    return source.replace(text, instead)


def test_each_fault_still_has_its_place() -> None:
    assert len(PLANTED) >= 20
    for fault, (*_, test) in PLANTED.items():
        compile(planted(fault), fault, "exec")
        file, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (REPOSITORY / file).read_text(encoding="utf-8"), test


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product and its tests, to plant faults in."""
    root = tmp_path_factory.mktemp("planted")
    for name in ("dphybrid", "tests"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return root


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not LONG, reason="half a minute a fault: DPHYBRID_LONG_TESTS=1 runs it")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, copied: Path) -> None:
    module, _, _, test = PLANTED[fault]
    file = copied / "dphybrid" / f"{module}.py"
    whole = file.read_bytes()
    file.write_text(planted(fault), encoding="utf-8")
    try:
        tries = ("-B", "-m", "pytest", "-n", "0", "-q", "-x", test)
        done = python(*tries, ends=None, cwd=copied, env={**os.environ, "PYTHONPATH": str(copied)})
    finally:
        file.write_bytes(whole)
    assert done.returncode == 1, done.stdout
    assert " failed" in done.stdout
