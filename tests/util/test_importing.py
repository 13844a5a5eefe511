"""What pages from elsewhere may import."""

from pathlib import Path

import pytest

from dphybrid.util.importing import check_installed
from tests.refusing import refused


@pytest.mark.parametrize("path", ["dphybrid.recipes.ctr:Ctr", "polars:DataFrame"])
def test_code_of_installed_packages_is_allowed(path: str) -> None:
    check_installed(path, "a file")


@pytest.mark.parametrize(
    "path", ["dphybrid_evil:make", "os:system", ".mine:make", ":make", "mine:make", "pack.m:f"]
)
def test_code_of_the_working_folder_and_of_python_itself_is_not(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "pack").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does
    with refused(f"^a file = '{path}' is code of no installed package"):
        check_installed(path, "a file")
