"""Check what Prefect's server does not check in deployments: values inside `overrides`, rules between fields,
parameters of schedules, cron lines.

`dphybrid validate` and `dphybrid deploy` check prefect.yaml; the plugin checks the parameters of
`prefect deployment run`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule
from pydantic import BaseModel, ValidationError

from dphybrid.orchestration.forms import experiment
from dphybrid.orchestration.machines import check_nodes
from dphybrid.recipes.configs import apply_overrides
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import read_small_text
from dphybrid.util.importing import import_module_of
from dphybrid.util.text import flag_text


def _check_parameters(
    entrypoint: str, parameters: Mapping[str, object], where: str, will_run: bool = False
) -> None:
    """Check the parameters of a deployment's flow. will_run: a schedule runs it with just these parameters,
    so none may be missing. Raises UserError that names `where` and each wrong field."""
    flow = load_flow(entrypoint)
    properties = flow.parameters.properties
    try:
        # Add the flow's defaults: a rule between two fields needs both of them.
        defaults = {name: facts["default"] for name, facts in properties.items() if "default" in facts}
        values = flow.validate_parameters(defaults | {**parameters})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {plain_words(e)}" for e in error.errors())
        raise UserError(f"{where}: {wrong}") from error
    except Exception as error:  # Prefect has its own exceptions for unknown names and wrong types
        raise UserError(f"{where}: {error}") from error
    check_values(values, where, entrypoint if will_run else "")


def check_values(parameters: Mapping[str, Any], where: str, entrypoint: str = "") -> None:
    """Check config, overrides and grid together, as the flow will read them. entrypoint: of the flow, to
    check the values that this flow requires as well; "" to skip that.

    Raises UserError that names `where` and the field.
    """
    try:
        config = experiment(parameters)
        if entrypoint.endswith("retrain_hybrid:retrain_hybrid") and config.checkpoint.register_as is None:
            raise UserError("checkpoint.register_as is not set; name the registered model to retrain")
        check_nodes(config, parameters.get("nodes") or 1)
        for name, given in (parameters.get("grid") or {}).items():
            ranged = parameters.get("trials") and isinstance(given, dict) and {"low", "high"} <= given.keys()
            values = [given["low"], given["high"]] if ranged else given
            if not isinstance(values, list):
                raise UserError(
                    f"grid: {name} = {given!r}; give a list of values, or with trials a range of low and high"
                )
            for value in values:
                apply_overrides(config, [f"{name}={flag_text(value)}"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def load_flow(entrypoint: str) -> Flow[..., object]:
    """Import `module:function`. Raises UserError when there is no such flow."""
    module, name = import_module_of(entrypoint, "entrypoint")
    found = vars(module).get(name)
    if not isinstance(found, Flow):
        raise UserError(f"entrypoint = {entrypoint!r}: {module.__name__} has no flow {name!r}")
    return found


class _Schedule(BaseModel):
    """The checked fields of a schedule."""

    slug: object = None
    cron: Any = None
    interval: Any = None
    rrule: Any = None
    timezone: Any = None
    parameters: dict[str, object] | None = None
    active: bool | None = True


class _Deployment(BaseModel):
    """The checked fields of a deployment in a prefect.yaml."""

    name: str
    entrypoint: str
    parameters: dict[str, object] | None = None
    schedules: list[_Schedule] | None = None


class _PrefectYaml(BaseModel):
    deployments: list[_Deployment] | None = None


PACKAGED = Path(__file__).with_name("prefect.yaml")
"""The project's own deployments, installed with the package."""


def deployments_file(given: Path | None) -> Path:
    """Return the given file, or the prefect.yaml of the current folder, or else the package's own."""
    here = Path("prefect.yaml")
    return given or (here if here.is_file() else PACKAGED)


def read_deployments(file: Path) -> list[_Deployment]:
    """Return the deployments of a prefect.yaml. Raises UserError if the file cannot be read as one."""
    try:
        page = _PrefectYaml.model_validate(yaml.safe_load(read_small_text(file)))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'the file'}: {plain_words(e)}" for e in error.errors()
        )
        raise UserError(f"{file}: is not a list of deployments as Prefect reads it: {wrong}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    return page.deployments or []


def check_prefect_yaml(file: Path) -> list[str]:
    """Check all deployments of a prefect.yaml and their schedules; return a line for each. Raises UserError
    that lists every mistake, and for a file without deployments."""
    lines: list[str] = []
    mistakes: list[str] = []
    if not (deployments := read_deployments(file)):
        raise UserError(f"{file}: has no deployments; `dphybrid deploy --write` writes a file with some")
    for deployment in deployments:
        base = deployment.parameters or {}
        checks = [(f"{file.name}: deployment {deployment.name}", base, False)]
        for number, schedule in enumerate(deployment.schedules or [], start=1):
            where = f"{file.name}: deployment {deployment.name}, schedule {schedule.slug or number}"
            checks.append((where, {**base, **(schedule.parameters or {})}, bool(schedule.active)))
            mistakes += _schedule_mistakes(schedule, where)
        for where, parameters, will_run in checks:
            try:
                _check_parameters(deployment.entrypoint, parameters, where, will_run)
            except UserError as error:
                mistakes.append(str(error))
            else:
                lines.append(f"{where}: valid")
    if mistakes:
        raise UserError("\n".join(mistakes))
    return lines


def _schedule_mistakes(schedule: _Schedule, where: str) -> list[str]:
    if not (schedule.cron or schedule.interval or schedule.rrule):
        return [f"{where}: has no cron, interval or rrule; give one, such as cron: 30 3 * * *"]
    if schedule.cron is None:
        return []
    if schedule.timezone is None:
        return [f"{where}: has no timezone; name one, such as Europe/Berlin"]
    try:
        ZoneInfo(schedule.timezone)
        CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    except (ValueError, OSError, KeyError, TypeError) as error:
        why = plain_words(error.errors()[0]) if isinstance(error, ValidationError) else error.args[0]
        return [f"{where}: cron {schedule.cron!r} with timezone {schedule.timezone!r}: {why}"]
    return []
