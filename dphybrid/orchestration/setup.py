"""`dphybrid deploy`: create or update everything that a Prefect server needs. It can be run any number of
times.

It makes the pool and its queues, the deployments of prefect.yaml (checked first, and merged with what people
have set on Prefect's pages), and the automation that marks runs whose machine died.
"""

import asyncio
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLI_WRAP_LINES, PREFECT_UI_URL, temporary_settings

from dphybrid.orchestration.checking import check_deployments, load_flow
from dphybrid.orchestration.forms import form_of
from dphybrid.orchestration.merging import (
    LOCAL,
    PACKAGED,
    SAID,
    as_in_file,
    merge,
    read_page,
    said_by_file,
    schedule_name,
)
from dphybrid.orchestration.queueing import ENDINGS, SILENT, SILENT_FOR, reaching_server
from dphybrid.orchestration.worker import SHARED_QUEUES
from dphybrid.recipes.registry import DEFAULT
from dphybrid.util.errors import UserError

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


async def _merged(page: dict[str, Any], reset: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the page of a prefect.yaml that is to be deployed, and a line for each difference between file
    and server."""
    deployments, lines = [], list[str]()
    async with get_client() as client:
        for said in page["deployments"]:
            try:
                there = await client.read_deployment_by_name(_full_name(said))
            except ObjectNotFound:
                deployments.append(said)
                continue
            entry, told = await merge(client, said, there, reset)
            deployments.append(entry)
            lines += told
    return page | {"deployments": deployments}, lines


async def _finish(page: dict[str, Any], deployed: dict[str, Any]) -> None:
    """Do what `prefect deploy` leaves undone: the form of a deployment's own recipe, the memory of what the
    file `page` says, and the removal of schedules that `deployed` no longer has."""
    async with get_client() as client:
        for said, entry in zip(page["deployments"], deployed["deployments"], strict=True):
            flow = load_flow(said["entrypoint"])
            # `prefect deploy` gives each deployment its flow's form, the same for all recipes.
            there = await client.read_deployment_by_name(_full_name(said))
            form = there.parameter_openapi_schema or {}
            if "config" in flow.parameters.properties:
                recipe = (there.parameters.get("config") or {}).get("recipe")
                if recipe is None and "recipe" not in flow.parameters.properties:
                    recipe = DEFAULT
                form = form_of(flow, recipe).model_dump(exclude_unset=True)
            form = form | {SAID: said_by_file(said)}
            await client.update_deployment(there.id, DeploymentUpdate(parameter_openapi_schema=form))
            wanted = said_by_file(entry)["schedules"]
            for schedule in there.schedules:
                if schedule_name(as_in_file(schedule)) not in wanted:
                    await client.delete_deployment_schedule(there.id, schedule.id)


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
    automation.id, automation.enabled = there.id, there.enabled
    await automation.aupdate()
    return "updated" if there.enabled else "updated; it is paused on the server, so lost runs stay lost"


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
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
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


def deploy(pool: str, hosts: Sequence[str], file: Path | None, reset: bool = False) -> None:
    """Set the server up. hosts: workstations that get their own queues. file: as in `read_page`. reset: undo
    what was changed on Prefect's pages."""
    page, named = read_page(file)
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
        deployed, differences = asyncio.run(_merged(page, reset))
        for line in differences:
            print(line, flush=True)
        if differences and not reset:
            print(f"`dphybrid deploy --reset` sets all of them as in {named.name}", flush=True)
        try:
            check_deployments(deployed["deployments"], named)
        except UserError as error:  # a value of an earlier version, say
            raise UserError(f"with what was set on the server: {error}\nUse --reset to undo it") from error
        with TemporaryDirectory() as folder:
            merged = Path(folder) / "prefect.yaml"
            merged.write_text(yaml.safe_dump(deployed, sort_keys=False), encoding="utf-8")
            call_prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(merged))
        asyncio.run(_finish(page, deployed))
    print(_what_next(page, address))
