"""What others' values may import: in runs that a worker starts, named packages alone."""

from pathlib import Path

import pytest

from dphybrid.recipes.configs import load_config
from dphybrid.recipes.registry import find_recipe
from dphybrid.util.importing import ONLY, check_import, import_callable
from tests.refusing import refused


@pytest.mark.parametrize(
    ("path", "packages", "allowed"),
    [
        ("dphybrid.recipes.ctr:Ctr", "", True),
        ("dphybrid_evil:make", "", False),
        ("mine.models:make", "others, mine", True),
        ("mineral:make", "mine", False),
        ("os:system", "mine,", False),
        (".mine:make", "mine", False),
    ],
)
def test_packages_are_allowed_by_their_whole_names(path: str, packages: str, allowed: bool) -> None:
    if allowed:
        check_import(path, "a file", packages)
        return
    with refused("^a file = .* would run code of package"):
        check_import(path, "a file", packages)


def test_a_workers_run_imports_from_named_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "foreign_models.py").write_text(f"open({str(ran)!r}, 'w')\ndef make(context): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(ONLY, "others")
    remedy = r"set DPHYBRID_FACTORY_PACKAGES=foreign_models \(for a worker"
    with refused(rf"model.factory = .* would run code .*{remedy}"):
        import_callable("foreign_models:make", "model.factory")
    with refused(rf"recipe = 'foreign_models:Mine' would run .*{remedy}"):
        load_config(None, ["recipe=foreign_models:Mine"])
    assert not ran.exists()
    assert find_recipe("ctr").name == "ctr"
    monkeypatch.setenv(ONLY, "others,foreign_models")
    assert callable(import_callable("foreign_models:make", "model.factory"))
    assert ran.exists()
