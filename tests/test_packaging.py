"""What a package says of itself is so: Pythons, packages, and the files that services and tools read."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
FORMS = sorted((REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_the_matrix_tries_the_pythons_that_the_package_names() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["everything"]
    named = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert job["strategy"]["matrix"]["python"] == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    assert (REPOSITORY / job["steps"][-1]["run"]).is_file()


def test_hooks_run_what_a_change_must_pass() -> None:
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    everything = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    for hook in hooks["repos"][0]["hooks"]:
        assert hook["entry"].removesuffix(" --fix") in everything


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "config.yml"], ids=lambda f: f.stem)
def test_a_form_has_what_the_service_wants(form: Path) -> None:
    page = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= page.keys()
    ids = [part["id"] for part in page["body"]]
    assert len(ids) == len(set(ids))
    assert all(part["attributes"]["label"] for part in page["body"])


def test_every_package_is_installed() -> None:
    there = {
        ".".join(file.parent.relative_to(REPOSITORY).parts)
        for file in (REPOSITORY / "dphybrid").rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == there | {"dphybrid.flows"}
