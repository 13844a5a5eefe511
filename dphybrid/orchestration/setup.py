"""`dphybrid deploy`: create everything that a Prefect server needs, or bring it up to date; run it as often
as you like.

Pool and queues, the deployments of prefect.yaml (checked first), and the automation that queues runs again
whose machine died.
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
    """Make the pool and its queues where they are not there; return their names by priority: those of these
    hosts, those of others that are there, and the shared ones."""
    try:
        await client.read_work_pool(pool)
    except ObjectNotFound:
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    there = {queue.name: queue for queue in await client.read_work_queues(work_pool_name=pool)}
    kept = sorted(there.keys() - {*hosts, *SHARED_QUEUES, "default"}, key=lambda name: there[name].priority)
    # Lower numbers come first, and a new queue gets the highest: runs of a host's own queue would wait behind
    # those of `any`. All of them in turn: a number that is taken pushes its queue and those behind it back.
    wanted = [*hosts, *kept, *SHARED_QUEUES]
    for priority, name in enumerate(wanted, start=1):
        if name in there:
            await client.update_work_queue(there[name].id, priority=priority)
        else:
            await client.create_work_queue(name, work_pool_name=pool, priority=priority)
    return wanted


async def _give_forms(file: Path) -> None:
    """Give each deployment of a dphybrid flow the form of its own recipe."""
    async with get_client() as client:
        for deployment in read_deployments(file):
            flow = load_flow(deployment.entrypoint)
            if "config" not in flow.parameters.properties:
                continue
            # Afterwards: Prefect's command gives a deployment its flow's form, the same for all recipes.
            there = await client.read_deployment_by_name(f"{flow.name}/{deployment.name}")
            recipe = (there.parameters.get("config") or {}).get("recipe", DEFAULT)
            form = form_of(flow, recipe).model_dump(exclude_unset=True)
            await client.update_deployment(there.id, DeploymentUpdate(parameter_openapi_schema=form))


async def _upsert_automation() -> str:
    """Make the automation, or bring the one of its name up to date (a second one would act twice); return
    which it did."""
    automation = Automation(
        name=_AUTOMATION,
        description="A training whose heartbeats stop has lost its machine. Workers queue it again, and one "
        "goes on from its checkpoint.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            # Running, too: a machine may die before the first heartbeat.
            after={_HEARTBEAT, "prefect.flow-run.Running"},
            expect={_HEARTBEAT, *_OVER},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            match_related={"prefect.resource.id": ["prefect.tag.dphybrid"]},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=SILENT_FOR,
        ),
        actions=[
            # Not SCHEDULED: Prefect triggers this for runs that ended long ago, too, which cannot become
            # Crashed, but would begin again.
            ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=SILENT, force=False)
        ],
    )
    try:
        there = await Automation.aread(name=_AUTOMATION)
    except ValueError:
        await automation.acreate()
        return "made"
    automation.id = there.id
    await automation.aupdate()
    return "brought up to date"


def call_prefect(*argv: str) -> None:
    """Call Prefect's command in this process, which has imported what takes most of its time: Prefect and the
    flows. Raises UserError with what it printed when it fails."""
    from prefect.cli import app

    printed = io.StringIO()
    before, sys.argv = sys.argv, ["prefect", *argv]
    try:
        whole_lines = temporary_settings({PREFECT_CLI_WRAP_LINES: False})
        with whole_lines, redirect_stdout(printed), redirect_stderr(printed):
            app()
    except SystemExit as end:
        if end.code:
            told = f"{printed.getvalue()}{'' if isinstance(end.code, int) else end.code}"
            raise UserError(f"deployments could not be made: {told[-2000:]}") from end
    finally:
        sys.argv = before


def write(file: Path) -> None:
    """Write the package's deployments, and beside them Prefect's settings. Raises UserError."""
    for path, packaged in ((file, PACKAGED), (file.with_name("prefect.toml"), PACKAGED.with_suffix(".toml"))):
        try:
            with path.open("x", encoding="utf-8") as out:
                out.write(packaged.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        print(f"{path}: written")
    print(f"Change {file.name}, then run `dphybrid deploy` in its folder")


def _what_next(file: Path, api: str) -> str:
    """Return the commands and addresses that a server with these deployments is used by."""
    names = [f"{load_flow(page.entrypoint).name}/{page.name}" for page in read_deployments(file)]
    first = next((name for name in names if name.endswith("/train-tutorial-hybrid")), names[0])
    lines = ["Deployments, made or brought up to date:", *(f"  {name}" for name in names)]
    lines += [f"Pages:  {PREFECT_UI_URL.value()}/deployments"]
    lines += [f"Worker: PREFECT_API_URL={api} dphybrid worker"]
    lines += [f"Run:    PREFECT_API_URL={api} prefect deployment run {first} --watch"]
    short = first.partition("/")[2]
    return "\n".join([*lines, f"        With PREFECT_PLUGINS_ENABLED=true, {short} alone names it, too."])


def deploy(pool: str, hosts: Sequence[str], file: Path | None) -> None:
    """Set the server up. hosts: workstations that get queues of their own. file: a prefect.yaml; None: the
    one here, or the package's."""
    file = deployments_file(file)
    if file == PACKAGED:
        print("Deployments: the package's own; `dphybrid deploy --write` puts them here, to be changed")
    check_prefect_yaml(file)

    async def make() -> None:
        async with get_client() as client:
            queues = await _make_queues(client, pool, hosts)
        print(f"Queues of pool {pool}, by priority: {', '.join(queues)}")
        print(f"Automation {_AUTOMATION!r}: {await _upsert_automation()}")

    with reaching_server() as address:
        asyncio.run(make())
        call_prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(file))
        asyncio.run(_give_forms(file))
    print(_what_next(file, address))
