"""`dphybrid new recipe`: the package that it writes does what its README says, in a folder of its own."""

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command, python


@pytest.mark.slow
def test_the_package_trains_and_passes_its_test(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "none")
    told = command("new", "recipe", "book_club")
    assert "cd book_club && dphybrid train --recipe book_club.recipe:BookClub" in told
    package = tmp_path / "book_club"
    files = [file for file in package.rglob("*") if file.is_file()]
    assert not [file for file in files if "newrecipe" in file.read_text().lower()]
    assert len((package / "README.md").read_text().splitlines()) <= 10
    assert "2 passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package).stdout


@pytest.mark.nightly
def test_the_installed_package_is_a_recipe_by_name(data_dir: Path, tmp_path: Path) -> None:
    command("new", "recipe", "book_club")
    site, package = tmp_path / "site", tmp_path / "book_club"
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    built = python("-c", build, cwd=package)
    with zipfile.ZipFile(package / built.stdout.split()[-1]) as wheel:
        wheel.extractall(site)  # what pip does with it
    installed: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(site)}}
    shown = python("-m", "dphybrid", "train", "--recipe", "book_club", "--help", **installed).stdout
    assert "book_club  Ratings that users give to items." in shown
    assert "--data.valid-fraction" in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("film-club", "use lower-case letters, digits and _"),
        ("9films", "use lower-case letters"),
        ("films_", "use lower-case letters"),
        ("../films", "use lower-case letters"),
        ("Films", "use lower-case letters"),
        ("class", "use lower-case letters"),
        ("kge", "of that name exists"),
        ("json", "of that name exists"),
        ("there", "of that name exists"),
    ],
)
def test_names_that_cannot_be_are_refused(name: str, words: str, data_dir: Path) -> None:
    Path("there").mkdir()
    assert words in command("new", "recipe", name, ends=2)
    assert [path.name for path in Path().iterdir()] == ["there"]
