"""Who may import whom, held by looking at what an import really brings along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
HEAVY = (
    "torch",
    "mlflow",
    "prefect",
    "polars",
    "pydantic",
    "pydantic_settings",
    "matplotlib",
    "sklearn",
    "rich",
    "prefect.server",
)


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("dphybrid", set()),
        ("dphybrid.util.device_spec", set()),
        ("dphybrid.config", {"pydantic"}),
        ("dphybrid.recipes.configs", {"pydantic"}),
        ("dphybrid.config.settings", {"pydantic", "pydantic_settings"}),
        ("dphybrid.parallel", {"torch"}),
        ("dphybrid.embedding", {"torch", "numpy"}),
        ("dphybrid.recipes.registry", {"torch", "pydantic"}),
        ("dphybrid.cli.main", {"pydantic", "pydantic_settings"}),
        # what MLflow imports, and no torch: they only read and send records
        ("dphybrid.tracking.compare, dphybrid.tracking.sync", {"mlflow", "polars", "pydantic"}),
        # the temporary server starts while the rest is imported, and in a process of its own
        ("flows.train_hybrid", {"prefect", "pydantic", "pydantic_settings", "rich"}),
    ],
)
def test_an_import_brings_no_more_than_allowed(module: str, allowed: set[str]) -> None:
    code = f"import sys, {module}; print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert set(found.stdout.split()) <= allowed


def imported_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "dphybrid").rglob("*.py")), ids=lambda f: str(f.relative_to(REPOSITORY))
)
def test_the_library_knows_no_prefect_and_mlflow_in_tracking_alone(file: Path) -> None:
    names = imported_names(file)
    assert "prefect" not in names or file.parent.name == "orchestration"
    assert "flows" not in names
    assert "mlflow" not in names or file.parent.name == "tracking"
    assert not {"fcntl", "filelock"} & names or file.name == "locks.py"


def test_arrows_between_the_rooms_run_downwards_only() -> None:
    tool = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", tool], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "0 broken" in done.stdout
