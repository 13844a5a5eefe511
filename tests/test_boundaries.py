"""What an import brings along, and the arrows between packages. Ruff's `banned-api` holds the rest."""

import os

import pytest

from tests.commands import python
from tests.conftest import REPOSITORY

HEAVY = ["torch", "mlflow", "prefect", "prefect.server", "polars", "pydantic", "matplotlib", "sklearn"]
HEAVY += ["rich", "pydantic_settings"]
SETTINGS = {"pydantic", "pydantic_settings"}
CHAINS: dict[str, list[tuple[str, set[str]]]] = {
    "configs": [
        ("dphybrid", set()),
        ("dphybrid.util.device_spec", set()),
        ("dphybrid.config", {"pydantic"}),
        ("dphybrid.recipes.configs", {"pydantic"}),
        ("dphybrid.cli.main, dphybrid.cli.train", {"pydantic"}),  # `dphybrid train --help`
        ("dphybrid.config.settings", SETTINGS),
        ("dphybrid.lifecycle.cleanup", SETTINGS),  # `dphybrid runs`
        # what MLflow imports, and no torch: they only read and send records
        ("dphybrid.tracking.models, dphybrid.tracking.sync", {"mlflow", "polars"} | SETTINGS),
        # Prefect's server is imported only where a temporary one starts
        ("flows.train_hybrid", {"prefect", "rich", "mlflow", "polars"} | SETTINGS),
    ],
    "models": [
        ("dphybrid.parallel", {"torch"}),
        ("dphybrid.embedding", {"torch"}),
        ("dphybrid.recipes.registry", {"torch", "pydantic"}),
    ],
}
"""Modules that a process imports one after the other, and what may be there then. Each may bring what the one
before it brings, so that one process shows as much as a process for each of them."""


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_an_import_brings_no_more_than_allowed(chain: list[tuple[str, set[str]]]) -> None:
    show = f"print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    code = "import sys\n" + "".join(f"import {module}\n{show}\n" for module, _ in chain)
    for (module, allowed), shown in zip(
        chain, python("-c", code, cwd=REPOSITORY).stdout.splitlines(), strict=True
    ):
        assert set(shown.split()) <= allowed, module


@pytest.mark.parametrize(
    ("variable", "own", "given"), [("OMP_WAIT_POLICY", "PASSIVE", "ACTIVE"), ("MKL_CBWR", "AUTO", "AVX2")]
)
def test_an_import_sets_what_libraries_read_once_unless_the_user_chose_otherwise(
    variable: str, own: str, given: str
) -> None:
    env = {name: value for name, value in os.environ.items() if name != variable}
    show = f"import os, dphybrid; print(os.environ[{variable!r}])"
    for more, wanted in (({}, own), ({variable: given}, given)):
        assert python("-c", show, env=env | more).stdout.strip() == wanted


def test_arrows_between_the_rooms_run_downwards_only() -> None:
    tool = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = python("-c", tool, cwd=REPOSITORY)
    assert "0 broken" in done.stdout
