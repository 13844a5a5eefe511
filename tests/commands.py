"""Run commands in this process: a separate one takes seconds for its imports."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

from dphybrid.cli.main import main
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.job import run_job
from dphybrid.run.pages import Report


def command(*argv: str, ends: int = 0) -> str:
    """Run `dphybrid`, expecting exit code `ends`. Return its output, or its errors when `ends` is 2."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(argv))
        except SystemExit as end:  # --help
            code = int(end.code or 0)
    assert code == ends, out.getvalue() + err.getvalue()
    return err.getvalue() if ends == 2 else out.getvalue()


def python(*argv: str | Path, ends: int | None = 0, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run Python in a separate process, with output as text. ends: the expected exit code; None: any."""
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False, **options)
    assert ends in (None, done.returncode), f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done


def run_with(*values: str, **options: Any) -> Report:
    """Prepare and train as `dphybrid train` does, with these overrides and the current settings."""
    return run_job(load_config(None, list(values)), load_settings(), **options)


def models_of(report: Any) -> list[Any]:
    """Return the models that MLflow has logged for a run. report: has its `tracking_uri` and `run_id`."""
    # Imported here: it takes a second, and programs that tests start import this module, too.
    from mlflow.tracking import MlflowClient

    client = MlflowClient(report.tracking_uri)
    experiment = client.get_run(report.run_id).info.experiment_id
    return list(client.search_logged_models([experiment], filter_string=f"source_run_id='{report.run_id}'"))


def version_of(registry: Any, name: str, number: str) -> Any:
    """Return a version of a registered model by its number."""
    from mlflow.tracking import MlflowClient

    run_id = MlflowClient(registry.uri, registry_uri=registry.uri).get_model_version(name, number).run_id
    return registry.newest(name, run_id)
