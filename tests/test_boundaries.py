"""What an import brings along, and the arrows between packages. Ruff's `banned-api` holds the rest."""

import os

import pytest

from tests.commands import python
from tests.conftest import REPOSITORY

HEAVY = ["torch", "mlflow", "prefect", "polars", "pydantic", "pydantic_settings", "matplotlib", "sklearn"]
HEAVY += ["rich", "prefect.server"]


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("dphybrid", set()),
        ("dphybrid.util.device_spec", set()),
        ("dphybrid.config", {"pydantic"}),
        ("dphybrid.recipes.configs", {"pydantic", "pydantic_settings"}),
        ("dphybrid.config.settings", {"pydantic", "pydantic_settings"}),
        ("dphybrid.parallel", {"torch"}),
        ("dphybrid.embedding", {"torch", "numpy"}),
        ("dphybrid.recipes.registry", {"torch", "pydantic"}),
        ("dphybrid.cli.main", {"pydantic", "pydantic_settings"}),
        # what MLflow imports, and no torch: they only read and send records
        ("dphybrid.tracking.compare_page, dphybrid.tracking.sync", {"mlflow", "polars", "pydantic"}),
        # the temporary server starts while the rest is imported, and in a process of its own
        ("flows.train_hybrid", {"prefect", "pydantic", "pydantic_settings", "rich"}),
    ],
)
def test_an_import_brings_no_more_than_allowed(module: str, allowed: set[str]) -> None:
    code = f"import sys, {module}; print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    found = python("-c", code, cwd=REPOSITORY)
    assert set(found.stdout.split()) <= allowed


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_that_wait_sleep_unless_the_user_chose_otherwise(given: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {"OMP_WAIT_POLICY": given} if given else {}
    found = python("-c", "import os, dphybrid; print(os.environ['OMP_WAIT_POLICY'])", env=env)
    assert found.stdout.strip() == (given or "PASSIVE")


def test_arrows_between_the_rooms_run_downwards_only() -> None:
    tool = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = python("-c", tool, cwd=REPOSITORY)
    assert "0 broken" in done.stdout
