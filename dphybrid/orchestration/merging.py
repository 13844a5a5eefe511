"""Read what prefect.yaml says of deployments, and merge it with what people have set on Prefect's pages.

Three versions are compared, value by value: the file now, the file at the last `dphybrid deploy` (kept in the
deployment's form on the server), and the server. What changed in the file is applied. Everything else stays
as it is on the server: a schedule that was switched on, parameters, a pause.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from pydantic import TypeAdapter

from dphybrid.util.errors import UserError
from dphybrid.util.files import read_small_text
from dphybrid.util.text import masked

PACKAGED = Path(__file__).with_name("prefect.yaml")
"""The project's own deployments, installed with the package."""
LOCAL = Path("prefect.local.yaml")
"""What people change in them: no part of the project, so that an upgrade does not touch it."""

SAID = "dphybrid.said"
"""Key in a deployment's parameter schema: what prefect.yaml said at the last `dphybrid deploy`."""
_NAMED = ("description", "tags", "work_pool")
"""What the server always has: compared only where the file names it."""
_ABSENT: Any = object()
_UNKNOWN: Any = object()


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
    return page, file


def _laid_over(below: Any, above: Any) -> Any:
    """Return `below` with the values of `above`; lists are replaced, mappings merged."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {name: _laid_over(below.get(name), value) for name, value in above.items()}


def _read(file: Path) -> dict[str, Any]:
    try:
        page = yaml.safe_load(read_small_text(file))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    entries = page.get("deployments") if isinstance(page, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{file}: has no deployments; `dphybrid deploy --write` writes a file with some")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise UserError(f"{file}: a deployment needs a name, and is {str(entry)[:80]!r}")
    return dict(page)


def said_by_file(page: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an entry of prefect.yaml says that can be changed on Prefect's pages, too."""
    said = {name: page[name] for name in (*_NAMED, "paused") if page.get(name) not in (None, False)}
    limit = page.get("concurrency_limit")
    if limit is not None:
        said["concurrency_limit"] = dict(limit) if isinstance(limit, dict) else {"limit": limit}
    schedules = {}
    for given in page.get("schedules") or []:
        schedule = {name: value for name, value in given.items() if value is not None}
        if isinstance(schedule.get("interval"), int | float | str):
            schedule["interval"] = (
                TypeAdapter(timedelta).validate_python(schedule["interval"]).total_seconds()
            )
        schedule = {"active": True, "parameters": {}} | schedule
        schedules[schedule_name(schedule)] = schedule
    said |= {
        "parameters": page.get("parameters") or {},
        "schedules": schedules,
        "triggers": {
            trigger["name"]: {"enabled": trigger.get("enabled", True)}
            for trigger in page.get("triggers") or []
            if "name" in trigger
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(said, default=str))  # as the server will give it back
    return plain


async def _on_server(client: PrefectClient, there: DeploymentResponse, named: Mapping[str, Any]) -> Any:
    """Return what the server has, in the words of prefect.yaml. named: what the file says, now or before."""
    has: dict[str, Any] = {
        "description": (there.description or ""),
        "tags": there.tags,
        "work_pool": {
            "name": there.work_pool_name,
            "work_queue_name": there.work_queue_name,
            "job_variables": there.job_variables,
        },
    }
    has = {name: value for name, value in has.items() if name in named}
    if "work_pool" in has:
        has["work_pool"] = {n: v for n, v in has["work_pool"].items() if n in named["work_pool"]}
    if "description" in has and has["description"].strip() == str(named["description"]).strip():
        has["description"] = named["description"]
    if there.paused:
        has["paused"] = True
    if there.global_concurrency_limit is not None:
        has["concurrency_limit"] = {"limit": there.global_concurrency_limit.limit}
        if there.concurrency_options is not None:
            options = there.concurrency_options.model_dump(mode="json", exclude_none=True)
            wanted = {"collision_strategy", *(named.get("concurrency_limit") or {})}
            has["concurrency_limit"] |= {n: v for n, v in options.items() if n in wanted}
    schedules = [as_in_file(schedule) for schedule in there.schedules]
    for schedule in schedules:
        same = named["schedules"].get(schedule_name(schedule))
        # Prefect fills in what the file leaves out.
        for name in ("timezone", "anchor_date", "slug"):
            if same is not None and name not in same:
                schedule.pop(name, None)
    automations = await client.read_resource_related_automations(f"prefect.deployment.{there.id}")
    has |= {
        "parameters": there.parameters,
        "schedules": {schedule_name(schedule): schedule for schedule in schedules},
        "triggers": {
            automation.name: {"enabled": automation.enabled}
            for automation in automations
            if automation.name in named["triggers"]
        },
    }
    return json.loads(json.dumps(has, default=str))


def schedule_name(schedule: Mapping[str, Any]) -> str:
    """Return the name of a schedule: its slug, or when it runs."""
    when = (schedule.get(name) for name in ("cron", "interval", "rrule"))
    return str(schedule.get("slug") or " ".join(str(value) for value in when if value))


def as_in_file(there: DeploymentSchedule) -> dict[str, Any]:
    """Return a schedule as prefect.yaml would describe it."""
    when, said = there.schedule, dict[str, Any]()
    if isinstance(when, CronSchedule):
        said = {"cron": when.cron, "timezone": when.timezone}
        said |= {} if when.day_or else {"day_or": False}
    elif isinstance(when, IntervalSchedule):
        said = {"interval": when.interval.total_seconds(), "timezone": when.timezone}
        said["anchor_date"] = when.anchor_date.isoformat()
    elif isinstance(when, RRuleSchedule):
        said = {"rrule": when.rrule, "timezone": when.timezone}
    said |= {"active": there.active, "parameters": there.parameters or {}, "slug": there.slug}
    return {name: value for name, value in said.items() if value is not None}


async def merge(
    client: PrefectClient, page: dict[str, Any], there: DeploymentResponse, reset: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the entry of prefect.yaml that is to be deployed, and a line for each difference between file
    and server.

    reset: let the file win everywhere.
    """
    said = said_by_file(page)
    before: Any = (there.parameter_openapi_schema or {}).get(SAID, _UNKNOWN)
    named = said if before is _UNKNOWN else before | said
    for kind in ("schedules", "triggers") if before is not _UNKNOWN else ():
        named[kind] = before[kind] | said[kind]
    lines: list[str] = []
    chosen = _chosen(before, said, await _on_server(client, there, named), reset, (), lines)
    merged = deepcopy(page)
    for name in (*_NAMED, "concurrency_limit"):
        merged.pop(name, None)
        if name in chosen:
            merged[name] = chosen[name]
    if list(merged.get("concurrency_limit", {})) == ["limit"]:  # Prefect wants a mapping to be complete
        merged["concurrency_limit"] = chosen["concurrency_limit"]["limit"]
    merged["paused"] = chosen.get("paused", False)
    merged["parameters"] = chosen["parameters"]
    merged["schedules"] = list(chosen["schedules"].values())
    for trigger in merged.get("triggers") or []:
        trigger |= chosen["triggers"].get(trigger.get("name"), {})
    return merged, [f"{page['name']}: {line}" for line in lines]


def _chosen(before: Any, said: Any, has: Any, reset: bool, where: tuple[str, ...], lines: list[str]) -> Any:
    """Return the value to deploy, or `_ABSENT`; add a line for each difference between file and server.

    before, said: the file's value at the last deployment (or `_UNKNOWN`) and now; has: the server's.
    """
    if isinstance(said, dict) and isinstance(has, dict):
        chosen = {}
        for name in {**said, **has}:
            known = before.get(name, _ABSENT) if isinstance(before, dict) else before
            now, there = said.get(name, _ABSENT), has.get(name, _ABSENT)
            value = _chosen(known, now, there, reset, (*where, name), lines)
            if value is not _ABSENT:
                chosen[name] = value
        return chosen
    if said == has:
        return said
    filled_in = isinstance(said, str) and "{{" in said  # Prefect has put a value in its place
    # Without knowledge of the last deployment, a value that the server has may be somebody's choice.
    changed = has is _ABSENT if before is _UNKNOWN else said != before
    path = ".".join(where)
    if reset or filled_in or changed:
        lines.append(f"{path}: {_shown(has)} on the server, becomes {_shown(said)}")
        return said
    lines.append(f"{path}: {_shown(has)} on the server stays; the file has {_shown(said)}")
    return has


def _shown(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    text = masked(json.dumps(value))
    return text if len(text) < 80 else f"{text[:80]}..."
