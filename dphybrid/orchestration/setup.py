"""`dphybrid deploy`: create or update everything that a Prefect server needs. It can be run any number of
times.

It makes the pool and its queues, the automation that marks runs whose machine died, and, with `prefect
deploy`, the deployments of a prefect.yaml, which it checks first.
"""

import asyncio
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.settings import PREFECT_CLI_WRAP_LINES, PREFECT_UI_URL, temporary_settings

from dphybrid.orchestration.checking import check_deployments, load_flow, read_deployments
from dphybrid.orchestration.queueing import ENDINGS, SILENT, SILENT_FOR, reaching_server
from dphybrid.orchestration.worker import make_queues
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


def check(file: Path | None) -> None:
    """Check the deployments without a server; print a line for each. Raises UserError with all mistakes."""
    for line in check_deployments(read_deployments(file)[1]):
        print(line)


def deploy(hosts: Sequence[str], given: Path | None) -> None:
    """Set the server up.

    Args:
        hosts: Workstations that get their own queues.
        given: As in `read_deployments`.
    """
    file, deployments = read_deployments(given)
    check_deployments(deployments)
    pools = dict.fromkeys(deployment["work_pool"]["name"] for deployment in deployments)

    async def make() -> None:
        for pool in pools:
            queues = await make_queues(pool, hosts, new_pool=True)
            print(f"Queues of pool {pool}, by priority: {', '.join(queues)}")
        print(f"Automation {_AUTOMATION!r}: {await _upsert_automation()}")

    with reaching_server() as address:
        asyncio.run(make())
        call_prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(file))
    names = [f"{load_flow(each['entrypoint']).name}/{each['name']}" for each in deployments]
    print(f"Deployments, as in {file}:", *(f"  {name}" for name in names), sep="\n")
    print(f"Pages:  {PREFECT_UI_URL.value()}/deployments")
    print(f"Worker: PREFECT_API_URL={address} dphybrid worker")
    print(f"Run:    PREFECT_API_URL={address} prefect deployment run {names[0]} --watch")
