"""`dphybrid deploy`: create or update everything that a Prefect server needs. It can be run any number of
times.

It makes the pool and its queues, the deployments of prefect.yaml (validated first), and the automation that
marks runs whose machine died.
"""

import asyncio
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLI_WRAP_LINES, PREFECT_UI_URL, temporary_settings

from dphybrid.orchestration.forms import form_of
from dphybrid.orchestration.queueing import ENDINGS, SILENT, SILENT_FOR, reaching_server
from dphybrid.orchestration.validate import (
    PACKAGED,
    check_prefect_yaml,
    deployments_file,
    load_flow,
    read_deployments,
)
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
    `hosts`, other existing ones, and the shared ones."""
    try:
        await client.read_work_pool(pool)
    except ObjectNotFound:
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    there = {queue.name: queue for queue in await client.read_work_queues(work_pool_name=pool)}
    kept = sorted(there.keys() - {*hosts, *SHARED_QUEUES, "default"}, key=lambda name: there[name].priority)
    # Lower numbers come first, and Prefect gives a new queue the highest number: a host's own queue would
    # come after `any`. Set all of them, in order: giving one a number in use moves the queues from there on
    # back.
    wanted = [*hosts, *kept, *SHARED_QUEUES]
    for priority, name in enumerate(wanted, start=1):
        if name in there:
            await client.update_work_queue(there[name].id, priority=priority)
        else:
            await client.create_work_queue(name, work_pool_name=pool, priority=priority)
    return wanted


async def _set_forms(file: Path) -> None:
    """Give each deployment of a dphybrid flow the form of its own recipe."""
    async with get_client() as client:
        for deployment in read_deployments(file):
            flow = load_flow(deployment.entrypoint)
            if "config" not in flow.parameters.properties:
                continue
            # After `prefect deploy`, which gives each deployment its flow's form, the same for all recipes.
            there = await client.read_deployment_by_name(f"{flow.name}/{deployment.name}")
            recipe = (there.parameters.get("config") or {}).get("recipe", DEFAULT)
            form = form_of(flow, recipe).model_dump(exclude_unset=True)
            await client.update_deployment(there.id, DeploymentUpdate(parameter_openapi_schema=form))


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
    automation.id = there.id
    await automation.aupdate()
    return "updated"


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


def write(file: Path) -> None:
    """Write the package's prefect.yaml to `file` and its prefect.toml beside it. Raises UserError if a file
    exists or cannot be written."""
    for path, packaged in ((file, PACKAGED), (file.with_name("prefect.toml"), PACKAGED.with_suffix(".toml"))):
        try:
            with path.open("x", encoding="utf-8") as out:
                out.write(packaged.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        print(f"{path}: written")
    print(f"Edit {file.name}, then run `dphybrid deploy` in its folder")


def _what_next(file: Path, api: str) -> str:
    """Return the text with the commands and addresses for using a server with these deployments."""
    names = [f"{load_flow(page.entrypoint).name}/{page.name}" for page in read_deployments(file)]
    first = next((name for name in names if name.endswith("/train-tutorial-hybrid")), names[0])
    lines = ["Deployments, created or updated:", *(f"  {name}" for name in names)]
    lines += [f"Pages:  {PREFECT_UI_URL.value()}/deployments"]
    lines += [f"Worker: PREFECT_API_URL={api} dphybrid worker"]
    lines += [f"Run:    PREFECT_API_URL={api} prefect deployment run {first} --watch"]
    short = first.partition("/")[2]
    return "\n".join([*lines, f"        With PREFECT_PLUGINS_ENABLED=true, the name {short} is enough."])


def deploy(pool: str, hosts: Sequence[str], file: Path | None) -> None:
    """Set the server up. hosts: workstations that get their own queues. file: a prefect.yaml; None: that of
    the current folder, or else the package's."""
    file = deployments_file(file)
    if file == PACKAGED:
        print("Deployments: those of the package; `dphybrid deploy --write` copies them here for you to edit")
    check_prefect_yaml(file)

    async def make() -> None:
        async with get_client() as client:
            queues = await _make_queues(client, pool, hosts)
        print(f"Queues of pool {pool}, by priority: {', '.join(queues)}")
        print(f"Automation {_AUTOMATION!r}: {await _upsert_automation()}")

    with reaching_server() as address:
        asyncio.run(make())
        call_prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(file))
        asyncio.run(_set_forms(file))
    print(_what_next(file, address))
