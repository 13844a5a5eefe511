"""`python -m dphybrid.orchestration.setup`: all that a Prefect server needs, made or brought up to date; run
it as often as you like.

Pool and queues, the deployments of prefect.yaml (checked first), and the automation that queues runs again
whose machine died.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from dphybrid.cli.parser import Parser, run_cli
from dphybrid.orchestration.alive import SILENT, SILENT_FOR
from dphybrid.orchestration.forms import form_of
from dphybrid.orchestration.queueing import ENDINGS
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

AUTOMATION = "dphybrid: notice runs whose machine died"
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


async def make_queues(client: PrefectClient, pool: str, hosts: Sequence[str]) -> list[str]:
    """Make the pool and its queues where they are not there; return what there is, by priority."""
    try:
        await client.read_work_pool(pool)
    except ObjectNotFound:
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    there = {queue.name: queue for queue in await client.read_work_queues(work_pool_name=pool)}
    # Lower numbers come first, and a new queue would get the highest.
    wanted = [*hosts, *SHARED_QUEUES]
    for priority, name in enumerate(wanted, start=1):
        if name not in there:
            await client.create_work_queue(name, work_pool_name=pool, priority=priority)
        elif there[name].priority != priority:
            await client.update_work_queue(there[name].id, priority=priority)
    return wanted


async def give_forms(file: Path) -> None:
    """Give each deployment of a dphybrid flow the form of its own recipe."""
    async with get_client() as client:
        for deployment in read_deployments(file):
            flow = load_flow(deployment.entrypoint)
            if "config" not in flow.parameters.properties:
                continue
            there = await client.read_deployment_by_name(f"{flow.name}/{deployment.name}")
            recipe = (there.parameters.get("config") or {}).get("recipe", DEFAULT)
            form = form_of(flow, recipe).model_dump(exclude_unset=True)
            await client.update_deployment(there.id, DeploymentUpdate(parameter_openapi_schema=form))


async def upsert_automation(silent_for: timedelta = SILENT_FOR) -> str:
    """Make the automation, or bring the one of its name up to date (a second one would act twice); return
    which it did."""
    automation = Automation(
        name=AUTOMATION,
        description="A training whose heartbeats stop has lost its machine. Workers queue it again, and one "
        "goes on from its checkpoint.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={_HEARTBEAT},
            expect={_HEARTBEAT, *_OVER},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            match_related={"prefect.resource.id": ["prefect.tag.dphybrid"]},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=silent_for,
        ),
        actions=[
            # Not SCHEDULED: Prefect triggers this for runs that ended long ago, too, which cannot become
            # Crashed, but would begin again.
            ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=SILENT, force=False)
        ],
    )
    try:
        there = await Automation.aread(name=AUTOMATION)
    except ValueError:
        await automation.acreate()
        return "made"
    automation.id = there.id
    await automation.aupdate()
    return "brought up to date"


def main(argv: Sequence[str] | None = None) -> int:
    """Set the server up; return the exit code."""
    parser = Parser(
        prog="dphybrid deploy",
        description="Set a Prefect server up for dphybrid, or bring it up to date.",
    )
    parser.add_argument("--pool", default="gpu", help="work pool (gpu)")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a workstation that gets a queue of its own; repeat",
    )
    parser.add_argument(
        "--file", type=Path, help="deployments (the prefect.yaml of this folder, or else the package's own)"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the package's prefect.yaml here, to be changed, and stop"
    )
    args = parser.parse_args(argv)

    def run() -> int:
        if args.write:
            file = args.file or Path("prefect.yaml")
            try:
                with file.open("x", encoding="utf-8") as out:
                    out.write(PACKAGED.read_text(encoding="utf-8"))
            except OSError as error:
                raise UserError(f"{file}: cannot be written: {error.strerror}") from error
            print(f"{file}: written; change it, then run `dphybrid deploy` in its folder")
            return 0
        file = deployments_file(args.file)
        if not PREFECT_API_URL.value():
            raise UserError(
                "PREFECT_API_URL is not set; name the Prefect server, such as http://server:4200/api"
            )
        if file == PACKAGED:
            print("Deployments: the package's own; `dphybrid deploy --write` puts them here, to be changed")
        for line in check_prefect_yaml(file):
            print(line)

        async def make() -> None:
            async with get_client() as client:
                print(
                    f"Queues of pool {args.pool}, by priority: "
                    f"{', '.join(await make_queues(client, args.pool, args.host))}"
                )
            print(f"Automation {AUTOMATION!r}: {await upsert_automation()}")

        asyncio.run(make())
        tool = Path(sys.executable).parent / "prefect"
        deploy = [str(tool), "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        done = subprocess.run(
            deploy,
            check=False,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        if done.returncode:
            raise UserError(f"deployments could not be made: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        asyncio.run(give_forms(file))
        print("Deployments: made or brought up to date; try `prefect deployment run train-hybrid`")
        return 0

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main())
