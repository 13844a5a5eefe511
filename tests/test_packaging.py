"""What the package says of itself is so, and it installs where there is no compiler."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.commands import python
from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_matrix_tries_the_pythons_that_the_package_names() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["everything"]
    named = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert job["strategy"]["matrix"]["python"] == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    assert (REPOSITORY / job["steps"][-1]["run"]).is_file()


def test_every_package_is_installed() -> None:
    folders = [file.parent for file in (REPOSITORY / "dphybrid").rglob("__init__.py")]
    there = {".".join(folder.relative_to(REPOSITORY).parts) for folder in folders}
    elsewhere = PROJECT["tool"]["setuptools"]["package-dir"].keys()
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == there | elsewhere


TRAINS = """
import sys, torch
from dphybrid.embedding import HostEmbedding, native, row_optimizer
table = HostEmbedding(100, 16, seed=0)
rows = row_optimizer("adagrad", table, lr=0.1)
for step in range(3):
    table(torch.arange(50) * (step + 1) % 100).square().sum().backward()
    rows.step()
    rows.zero_grad()
print(table.weight.sum().item().hex(), native.__file__)
"""


def trained(folder: Path, **variables: str) -> list[str]:
    gone = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    return python("-c", TRAINS, env=gone | variables, cwd=folder).stdout.split()


@pytest.mark.nightly
def test_a_machine_without_a_compiler_installs_it(tmp_path: Path) -> None:
    """ziglang comes from the package index, into the build's own environment."""
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "bin"
    leave = shutil.ignore_patterns(".git", "build", "*.egg-info", "*.so", "__pycache__", "tests", "docs")
    shutil.copytree(REPOSITORY, source, ignore=leave)
    empty.mkdir()
    bare = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    bare |= {"PATH": str(empty), "TMPDIR": str(tmp_path)}
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(site), str(source)]
    done = subprocess.run(install, env=bare, capture_output=True, text=True, check=False)
    if done.returncode and "ziglang" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("no package index with ziglang")
    assert done.returncode == 0, done.stderr[-3000:]
    levels = {file.name.rpartition("-")[0] for file in (site / "dphybrid/kernels").glob("_rows-*.so")}
    assert levels >= {"_rows-x86-64-v2", "_rows-x86-64-v3", "_rows-x86-64-v4"} or len(levels) == 1
    number, file = trained(tmp_path, PYTHONPATH=str(site), PATH=str(empty))
    assert file.startswith(str(site))
    assert number == trained(tmp_path)[0]
