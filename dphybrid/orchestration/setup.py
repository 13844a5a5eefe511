"""`dphybrid deploy`: create or update everything that a Prefect server needs. It can be run any number of
times.

It makes the pool and its queues, the deployments of prefect.yaml (checked first), and the automation that
marks runs whose machine died. Of a deployment that exists it renews the code, its form and its version; what
people have set on Prefect's pages stays.
"""

import asyncio
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLI_WRAP_LINES, PREFECT_UI_URL, temporary_settings
from pydantic import TypeAdapter

from dphybrid.config import flatten
from dphybrid.orchestration.checking import LOCAL, PACKAGED, check_deployments, load_flow, read_page
from dphybrid.orchestration.forms import FEW, experiment, form_of
from dphybrid.orchestration.queueing import ENDINGS, SILENT, SILENT_FOR, reaching_server
from dphybrid.orchestration.worker import SHARED_QUEUES
from dphybrid.recipes.registry import DEFAULT
from dphybrid.util.errors import UserError
from dphybrid.util.text import masked

_AUTOMATION = "dphybrid: notice runs whose machine died"
_HEARTBEAT = "prefect.flow-run.heartbeat"
_OVER = [
    f"prefect.flow-run.{name}"
    for name in (
        "Completed",
        "Failed",
        "Cancelled",
        "Crashed",
        "TimedOut",
        "Paused",
        "Suspended",
        "AwaitingRetry",
        *ENDINGS,
    )
]


async def _make_queues(client: PrefectClient, pool: str, hosts: Sequence[str]) -> list[str]:
    """Create the pool and its queues if they do not exist; return the queues' names by priority: those of
    `hosts`, the existing ones in their order, and new shared ones."""
    try:
        await client.read_work_pool(pool)
    except ObjectNotFound:
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    there = {queue.name: queue for queue in await client.read_work_queues(work_pool_name=pool)}
    kept = sorted(there.keys() - {*hosts, "default"}, key=lambda name: there[name].priority)
    # Lower numbers come first, and Prefect gives a new queue the highest number: a host's own queue would
    # come after `any`. Set all of them, in order: giving one a number in use moves the queues from there on
    # back.
    wanted = [*hosts, *kept, *(name for name in SHARED_QUEUES if name not in there)]
    if wanted == sorted(there.keys() - {"default"}, key=lambda name: there[name].priority):
        return wanted
    for priority, name in enumerate(wanted, start=1):
        if name in there:
            await client.update_work_queue(there[name].id, priority=priority)
        else:
            await client.create_work_queue(name, work_pool_name=pool, priority=priority)
    return wanted


async def _on_server(page: dict[str, Any]) -> list[DeploymentResponse | None]:
    """Return what the server has of each deployment of a prefect.yaml; None for a new one."""
    found = list[DeploymentResponse | None]()
    async with get_client() as client:
        for entry in page["deployments"]:
            try:
                found.append(await client.read_deployment_by_name(_full_name(entry)))
            except ObjectNotFound:
                found.append(None)
    return found


async def _renew(page: dict[str, Any]) -> None:
    """Give each deployment the file's code, and the form and version of that code. All else is as
    `prefect deploy` has made it, or as people have set it since."""
    async with get_client() as client:
        for entry in page["deployments"]:
            flow = load_flow(entry["entrypoint"])
            there = await client.read_deployment_by_name(_full_name(entry))
            form = flow.parameters
            if "config" in form.properties:
                recipe = (there.parameters.get("config") or {}).get("recipe")
                if recipe is None and "recipe" not in form.properties:
                    recipe = DEFAULT
                # `prefect deploy` gives each deployment its flow's form, the same for all recipes.
                form = form_of(flow, recipe)
                if form.required:
                    given = flatten(experiment(there.parameters).model_dump())
                    form.required = [name for name in form.required if not given[FEW[name]]]
            new: dict[str, Any] = {
                "entrypoint": entry["entrypoint"],
                "version": entry.get("version") or flow.version,
                "parameter_openapi_schema": form.model_dump(exclude_unset=True),
                # Workers know kinds of runs by tags.
                "tags": [*there.tags, *(tag for tag in entry.get("tags") or [] if tag not in there.tags)],
            }
            if entry.get("description"):
                new["description"] = entry["description"]
            if (pull := entry.get("pull", page.get("pull"))) is not None:
                new["pull_steps"] = pull
            await client.update_deployment(there.id, DeploymentUpdate(**new))
            renewed = await client.read_deployment(there.id)
            # The server has deleted the runs to come. Its scheduler makes them again seconds later, without
            # those that have fallen due meanwhile. Of runs that are still there it makes no second ones.
            if not renewed.paused and renewed.updated is not None:
                since = {"start_time": renewed.updated.isoformat()}
                which = {"id": there.id}
                await client.request("POST", "/deployments/{id}/schedule", path_params=which, json=since)


async def _without_schedules(deployments: Iterable[DeploymentResponse]) -> None:
    async with get_client() as client:
        for there in deployments:
            for schedule in there.schedules:
                await client.delete_deployment_schedule(there.id, schedule.id)


def _as_in_file(there: DeploymentResponse) -> dict[str, Any]:
    """Return what people may have set on Prefect's pages, as prefect.yaml would describe it."""
    schedules = [
        each.schedule.model_dump(exclude_none=True)
        | {"active": each.active, "slug": each.slug, "parameters": each.parameters or {}}
        for each in there.schedules
    ]
    return {"parameters": there.parameters, "paused": there.paused, "schedules": schedules}


def _values_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return parameters, schedules and the pause of a deployment, as text by name."""
    found = {
        f"parameters.{name}": masked(json.dumps(value, default=str))
        for name, value in (entry.get("parameters") or {}).items()
    }
    for given in entry.get("schedules") or []:
        when = next(str(given[kind]) for kind in ("cron", "rrule", "interval") if given.get(kind))
        if given.get("interval"):
            when = f"every {TypeAdapter(timedelta).validate_python(given['interval'])}"
        zone = f" {given['timezone']}" if given.get("cron") else ""
        state = "on" if given.get("active", True) else "off"
        own = f" with {json.dumps(given['parameters'], default=str)}" if given.get("parameters") else ""
        found[f"schedules.{given.get('slug') or when}"] = masked(f"{when}{zone}, {state}{own}")
    return found | ({"paused": "true"} if entry.get("paused") else {})


def _differences(entry: dict[str, Any], there: DeploymentResponse) -> list[str]:
    """Return a line for each value that stays as it is on the server and differs from the file's."""
    has, says = _values_of(_as_in_file(there)), _values_of(entry)
    return [
        f"{entry['name']}: {name}: {has.get(name, 'nothing')} on the server stays; the file has "
        f"{says.get(name, 'nothing')}"
        for name in {**says, **has}
        if has.get(name) != says.get(name)
    ]


def _full_name(said: dict[str, Any]) -> str:
    return f"{load_flow(said['entrypoint']).name}/{said['name']}"


async def _upsert_automation() -> str:
    """Create the automation, or update the existing one of its name; return which was done. A second one
    would act twice."""
    automation = Automation(
        name=_AUTOMATION,
        description="Marks a training as crashed when its heartbeats stop, because its machine has died. A "
        "worker then queues it again, and it continues from its checkpoint.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            # After Running, too: a machine may die before the first heartbeat.
            after={_HEARTBEAT, "prefect.flow-run.Running"},
            expect={_HEARTBEAT, *_OVER},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            match_related={"prefect.resource.id": ["prefect.tag.dphybrid"]},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=SILENT_FOR,
        ),
        actions=[
            # Not SCHEDULED, which would queue the run directly: Prefect also triggers this for runs that
            # ended long ago. They cannot become Crashed, but SCHEDULED would start them again.
            ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=SILENT, force=False)
        ],
    )
    try:
        there = await Automation.aread(name=_AUTOMATION)
    except ValueError:
        await automation.acreate()
        return "created"
    automation.enabled = there.enabled
    if _plain(there) == _plain(automation):
        return "unchanged"  # a trigger that is written again forgets the runs that it watches
    automation.id = there.id
    await automation.aupdate()
    return "updated" if there.enabled else "updated; it is paused on the server, so lost runs stay lost"


def _plain(automation: Automation) -> dict[str, Any]:
    page = automation.model_dump(mode="json", exclude={"id": True, "trigger": {"id"}})
    # Events are sets, which come in another order from the server.
    trigger = {
        name: sorted(part) if isinstance(part, list) else part for name, part in page["trigger"].items()
    }
    return page | {"trigger": trigger}


def call_prefect(*argv: str) -> None:
    """Run the `prefect` command in this process. Raises UserError with its output when it fails.

    A new process would take long, mostly to import Prefect and the flows, which this one has imported.
    """
    from prefect.cli import app

    printed = io.StringIO()
    before, sys.argv = sys.argv, ["prefect", *argv]
    try:
        whole_lines = temporary_settings({PREFECT_CLI_WRAP_LINES: False})
        with whole_lines, redirect_stdout(printed), redirect_stderr(printed):
            app()
    except SystemExit as end:
        if end.code:
            output = f"{printed.getvalue()}{'' if isinstance(end.code, int) else end.code}"
            raise UserError(f"deployments could not be created: {output[-2000:]}") from end
    finally:
        sys.argv = before


def write(file: Path | None) -> None:
    """Write a `prefect.local.yaml` to edit (or another `file`), and the package's prefect.toml beside it.
    Never overwrites a file: Raises UserError if the first one exists or cannot be written."""
    file = file or LOCAL
    settings = file.with_name("prefect.toml")
    for path, source in ((file, "prefect.example.yaml"), (settings, settings.name)):
        if path == settings and path.exists():
            continue
        try:
            with path.open("x", encoding="utf-8") as out:
                out.write(PACKAGED.with_name(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {error.strerror}; name another file with --file"
            ) from error
        print(f"{path}: written")
    print(f"Edit {file.name}, then run `dphybrid deploy` in its folder")


def check(file: Path | None) -> None:
    """Check the deployments without a server; print a line for each. Raises UserError with all mistakes."""
    page, named = read_page(file)
    for line in check_deployments(page["deployments"], named):
        print(line)


def _what_next(page: dict[str, Any], api: str) -> str:
    """Return the text with the commands and addresses for using a server with these deployments."""
    names = [_full_name(entry) for entry in page["deployments"]]
    first = next((name for name in names if name.endswith("/train-tutorial-hybrid")), names[0])
    lines = ["Deployments, created or updated:", *(f"  {name}" for name in names)]
    lines += [f"Pages:  {PREFECT_UI_URL.value()}/deployments"]
    lines += [f"Worker: PREFECT_API_URL={api} dphybrid worker"]
    lines += [f"Run:    PREFECT_API_URL={api} prefect deployment run {first} --watch"]
    short = first.partition("/")[2]
    return "\n".join([*lines, f"        With PREFECT_PLUGINS_ENABLED=true, the name {short} is enough."])


def deploy(pool: str, hosts: Sequence[str], given: Path | None, reset: bool = False) -> None:
    """Set the server up.

    Args:
        hosts: Workstations that get their own queues.
        given: As in `read_page`.
        reset: Set the deployments that exist as in the file, too; else only their code, form and version are
            renewed.
    """
    page, named = read_page(given)
    if named == PACKAGED:
        print("Deployments: those of the package; `dphybrid deploy --write` makes a file for your changes")
    check_deployments(page["deployments"], named)

    async def make() -> None:
        async with get_client() as client:
            queues = await _make_queues(client, pool, hosts)
        print(f"Queues of pool {pool}, by priority: {', '.join(queues)}")
        print(f"Automation {_AUTOMATION!r}: {await _upsert_automation()}")

    with reaching_server() as address:
        asyncio.run(make())
        both = list(zip(page["deployments"], asyncio.run(_on_server(page)), strict=True))
        kept = [(entry, there) for entry, there in both if there is not None and not reset]
        try:
            check_deployments([entry | _as_in_file(there) for entry, there in kept], named)
        except UserError as error:  # a value of an earlier version, say
            raise UserError(f"with what was set on the server: {error}\nUse --reset to undo it") from error
        if lines := [line for entry, there in kept for line in _differences(entry, there)]:
            print("\n".join(lines))
            print(f"`dphybrid deploy --reset` sets all of them as in {named.name}", flush=True)
        made = [entry for entry, there in both if there is None or reset]
        if made:
            asyncio.run(_without_schedules(there for _, there in both if there is not None and reset))
            with TemporaryDirectory() as folder:
                file = Path(folder) / "prefect.yaml"
                file.write_text(yaml.safe_dump(page | {"deployments": made}, sort_keys=False), "utf-8")
                call_prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(file))
        asyncio.run(_renew(page))
    print(_what_next(page, address))
