"""Read a prefect.yaml, and check what Prefect does not check in it: values inside `overrides`, rules between
fields, the parameters of schedules, and grids (`dphybrid deploy --check`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.schemas.actions import DeploymentScheduleUpdate
from prefect.client.schemas.schedules import CronSchedule
from pydantic import ValidationError

from dphybrid.orchestration.forms import experiment
from dphybrid.recipes.configs import apply_overrides
from dphybrid.util.errors import UserError, plain_words
from dphybrid.util.files import no_such_file, read_own_text, read_small_text
from dphybrid.util.importing import import_module_of
from dphybrid.util.text import flag_text

PACKAGED = Path(__file__).with_name("prefect.yaml")
"""The project's own deployments, installed with the package."""
LOCAL = Path("prefect.local.yaml")
"""What people change in them: no part of the project, so that an upgrade does not touch it."""

_UNLESS_GIVEN: dict[str, Any] = {
    "paused": False,
    "parameters": {},
    "tags": ["dphybrid"],  # by which the automation and workers know its runs
    # stream_output: as in the package's deployments
    "work_pool": {"name": "gpu", "work_queue_name": "any", "job_variables": {"stream_output": False}},
}
"""What Prefect requires of an entry that it creates: without a work pool it would refuse it."""


def read_page(given: Path | None) -> tuple[dict[str, Any], Path]:
    """Return the deployments to make, as a prefect.yaml has them, and the file that names them.

    given: the file; None: the prefect.yaml of the current folder, or else the package's. Then each entry of a
    `prefect.local.yaml` in the current folder is added, or laid over the entry of the same name. Raises
    UserError for files that cannot be read.
    """
    here = Path("prefect.yaml")
    file = given or (here if here.is_file() else PACKAGED)
    page = _read(file)
    if given is None and LOCAL.is_file():
        entries = {entry["name"]: entry for entry in page["deployments"]}
        for own in _read(LOCAL)["deployments"]:
            entries[own["name"]] = _laid_over(entries.get(own["name"], {}), own)
        page, file = page | {"deployments": [*entries.values()]}, LOCAL
    for entry in page["deployments"]:
        if not isinstance(entry.get("entrypoint"), str):
            raise UserError(f"{file}: deployment {entry['name']} needs an entrypoint")
    return page | {"deployments": [_UNLESS_GIVEN | entry for entry in page["deployments"]]}, file


def _laid_over(below: Any, above: Any) -> Any:
    """Return `below` with the values of `above`; lists are replaced, mappings merged."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {name: _laid_over(below.get(name), value) for name, value in above.items()}


def _read(file: Path) -> dict[str, Any]:
    try:
        # Code beside a file is imported with it, so the file must be the user's own.
        page = yaml.safe_load(read_small_text(file) if file == PACKAGED else read_own_text(file))
    except FileNotFoundError as error:
        raise no_such_file(str(file), "--file") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    entries = page.get("deployments") if isinstance(page, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{file}: has no deployments; `dphybrid deploy --write` writes a file with some")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise UserError(f"{file}: a deployment needs a name, and is {str(entry)[:80]!r}")
    return dict(page)


def load_flow(entrypoint: str) -> Flow[..., object]:
    """Import `module:function`. Raises UserError when there is no such flow."""
    module, name = import_module_of(entrypoint, "entrypoint")
    found = vars(module).get(name)
    if not isinstance(found, Flow):
        raise UserError(f"entrypoint = {entrypoint!r}: {module.__name__} has no flow {name!r}")
    return found


def check_deployments(entries: list[dict[str, Any]], file: Path) -> list[str]:
    """Check deployments and their schedules; return a line for each. Raises UserError with every mistake."""
    lines, mistakes = list[str](), list[str]()
    for entry in entries:
        given = entry.get("schedules") or []
        if not isinstance(given, list) or not all(isinstance(schedule, dict) for schedule in given):
            mistakes.append(f"{file.name}: deployment {entry['name']}: schedules: must be a list of mappings")
            continue
        named = {f", schedule {one.get('slug') or number}": one for number, one in enumerate(given, start=1)}
        for part, schedule in ({"": None} | named).items():
            where = f"{file.name}: deployment {entry['name']}{part}"
            try:
                _check(load_flow(entry["entrypoint"]), entry.get("parameters") or {}, schedule)
                lines.append(f"{where}: valid")
            except UserError as error:
                mistakes.append(f"{where}: {error}")
    if mistakes:
        raise UserError("\n".join(mistakes))
    return lines


def _check(flow: Flow[..., object], parameters: Any, schedule: Mapping[str, Any] | None) -> None:
    """Check the parameters of a deployment, or the schedule that starts it and its parameters."""
    own, properties = (schedule or {}).get("parameters") or {}, flow.parameters.properties
    if not isinstance(parameters, dict) or not isinstance(own, dict):
        raise UserError("parameters: must be a mapping of names to values")
    try:
        if schedule is not None:
            if not any(schedule.get(kind) for kind in ("cron", "interval", "rrule")):
                raise UserError("has no cron, interval or rrule; give one, such as cron: 30 3 * * *")
            if schedule.get("cron") and not schedule.get("timezone"):
                raise UserError("has no timezone; name one, such as Europe/Berlin")
            DeploymentScheduleUpdate(active=schedule.get("active"), slug=schedule.get("slug"))
            if schedule.get("cron"):
                CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
        # Add the flow's defaults: a rule between two fields needs both of them.
        defaults = {name: facts["default"] for name, facts in properties.items() if "default" in facts}
        values = flow.validate_parameters(defaults | parameters | own)
    except UserError:
        raise
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {plain_words(e)}" for e in error.errors())
        raise UserError(wrong) from error
    except Exception as error:  # Prefect has its own exceptions for unknown names and wrong types
        raise UserError(str(error)) from error
    check_values(values)
    # A schedule that runs has nobody who could fill in what is missing.
    runs = schedule is not None and schedule.get("active", True)
    if runs and "register_as" in properties and experiment(values).checkpoint.register_as is None:
        raise UserError("checkpoint.register_as is not set; name the registered model to retrain")


def check_values(parameters: Mapping[str, Any]) -> None:
    """Check config, overrides and grid together, as the flow will read them. Raises UserError that names the
    field."""
    config = experiment(parameters)
    for name, given in (parameters.get("grid") or {}).items():
        ranged = parameters.get("trials") and isinstance(given, dict) and {"low", "high"} <= given.keys()
        values = [given["low"], given["high"]] if ranged else given
        if not isinstance(values, list):
            raise UserError(
                f"grid: {name} = {given!r}; give a list of values, or with trials a range of low and high"
            )
        for value in values:
            apply_overrides(config, [f"{name}={flag_text(value)}"])
