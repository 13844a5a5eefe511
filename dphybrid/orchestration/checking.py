"""Check what Prefect does not check in a prefect.yaml: values inside `config` and `overrides`, rules between
fields, the parameters of schedules, and grids (`dphybrid deploy --check`)."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule
from pydantic import ValidationError

from dphybrid.orchestration.forms import experiment
from dphybrid.recipes.configs import apply_overrides
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import no_such_file
from dphybrid.util.importing import import_module_of
from dphybrid.util.text import flag_text

PACKAGED = Path(__file__).with_name("prefect.yaml")
"""The project's own deployments, installed with the package."""


def read_deployments(given: Path | None) -> tuple[Path, list[dict[str, Any]]]:
    """Return a prefect.yaml and its deployments. given: the file; None: the prefect.yaml of the current
    folder, or else the package's. Raises UserError for a file that cannot be read."""
    here = Path("prefect.yaml")
    file = given or (here if here.is_file() else PACKAGED)
    try:
        page = yaml.safe_load(file.read_text("utf-8") if file == PACKAGED else _own_text(file))
        deployments = list(page["deployments"])
        for deployment in deployments:
            _ = deployment["name"] + deployment["entrypoint"], deployment["work_pool"]["name"]
    except FileNotFoundError as error:
        raise no_such_file(str(file), "--file") from error
    except UserError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{file}: needs `deployments`, each with name, entrypoint and work_pool; copy {PACKAGED} and "
            "edit it"
        ) from error
    return file, deployments


def _own_text(path: Path) -> str:
    """Return the text of a file whose flows are imported. Raises UserError if another user may write it."""
    with path.open("rb") as stream:
        # Of the open file, as the name can lead to another one a moment later; a link's owner chooses that.
        file, link = os.fstat(stream.fileno()), path.lstat()
        if {file.st_uid, link.st_uid} - {0, os.getuid()} or file.st_mode & stat.S_IWOTH:
            raise UserError(
                f"{path.absolute()} is ignored: others may write it; work in a folder of your own"
            )
        return stream.read().decode()


def load_flow(entrypoint: str) -> Flow[..., object]:
    """Import `module:function`. Raises UserError when there is no such flow."""
    module, name = import_module_of(entrypoint, "entrypoint")
    flow = vars(module).get(name)
    if not isinstance(flow, Flow):
        raise UserError(f"entrypoint = {entrypoint!r}: {module.__name__} has no flow {name!r}")
    return flow


def check_deployments(deployments: list[dict[str, Any]]) -> list[str]:
    """Check deployments and their schedules; return a line for each. Raises UserError with every mistake."""
    lines, mistakes = list[str](), list[str]()
    for deployment in deployments:
        for number, schedule in enumerate([None, *(deployment.get("schedules") or [])]):
            where = f"deployment {deployment['name']}"
            where += f", schedule {schedule.get('slug') or number}" if schedule else ""
            try:
                _check(deployment, schedule)
                lines.append(f"{where}: valid")
            except UserError as error:
                mistakes.append(f"{where}: {error}")
    if mistakes:
        raise UserError("\n".join(mistakes))
    return lines


def _check(deployment: Mapping[str, Any], schedule: Mapping[str, Any] | None) -> None:
    """Check the parameters of a deployment, or the schedule that starts it and its parameters."""
    flow, scheduled = load_flow(deployment["entrypoint"]), schedule or {}
    try:
        if "cron" in scheduled:
            CronSchedule(cron=scheduled["cron"], timezone=scheduled.get("timezone"))
        own = scheduled.get("parameters") or {}
        values = flow.validate_parameters((deployment.get("parameters") or {}) | own)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {plain_words(e)}" for e in error.errors())
        raise UserError(wrong) from error
    except Exception as error:  # Prefect has its own exceptions for unknown names and wrong types
        raise UserError(str(error)) from error
    if "config" not in flow.parameters.properties:
        return
    config = experiment(values)
    for name, given in (values.get("grid") or {}).items():
        choices = [given["low"], given["high"]] if isinstance(given, dict) else given
        for choice in choices:
            apply_overrides(config, [f"{name}={flag_text(choice)}"])
    # A schedule that runs has nobody who could fill in what is missing.
    runs = schedule is not None and scheduled.get("active", True)
    if runs and "register_as" in flow.parameters.properties and config.checkpoint.register_as is None:
        raise UserError("register_as is not set; name the registered model to retrain")
