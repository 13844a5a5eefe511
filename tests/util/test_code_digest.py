"""The digest of a reader's code follows what the reader imports from its own package or folder."""

import importlib
import sys
from pathlib import Path

import pytest

from dphybrid.util.digests import code_digest


@pytest.mark.parametrize(
    ("reader", "imports", "helper"),
    [
        ("mine_a.py", "import mine_b", "mine_b.py"),
        ("mine_p/reader.py", "from .cells import number", "mine_p/cells.py"),
        ("mine_q/reader.py", "from mine_q import cells", "mine_q/cells.py"),
    ],
)
def test_a_changed_helper_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, imports: str, helper: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in (reader, helper):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if "/" in name:
            (tmp_path / name).with_name("__init__.py").touch()
    (tmp_path / reader).write_text(f"{imports}\nimport json\nclass Reader:\n    pass\n")
    digests = []
    for line in ("number = 1\n", "number = 1  # the same\n", "number = 22\n"):
        (tmp_path / helper).write_text(line)
        for name in [name for name in sys.modules if name.startswith("mine_")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        module = importlib.import_module(reader.removesuffix(".py").replace("/", "."))
        digests.append(code_digest([module.Reader]))
    assert digests[0] == digests[1] != digests[2]
