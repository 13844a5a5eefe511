"""Shared parts of the flows: `trained` is `dphybrid.run.job.run_job` with each step as a Prefect task."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from typing import TypeVar

from prefect import runtime, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.orchestration.queueing import REFUSED, waiting
from dphybrid.orchestration.shown import show_run, tolerating_outage
from dphybrid.run import job
from dphybrid.run.folder import FLOW_RUN_TAG, Run, attached, find_tagged_run
from dphybrid.run.pages import Report
from dphybrid.util.alive import alive
from dphybrid.util.files import disk_errors_told
from dphybrid.util.stop import Interrupted, StopRequest

_LOOK_EVERY_S = 0.5
_R = TypeVar("_R")


def as_task(name: str, work: Callable[[], _R]) -> _R:
    """Do `work` as a task of the current flow run; return its result, which does not pass through Prefect.

    An Interrupted leaves this call as it would leave `work`, and the task ends as Cancelled; Prefect alone
    would log a crash.
    """
    done, interruptions = list[_R](), list[Interrupted]()

    @task(name=name, cache_policy=NO_CACHE)
    # Inside the task, although `build_run` does the same around it: Prefect logs the traceback of any
    # exception but a UserError that leaves a task.
    @disk_errors_told("then continue with --resume")
    def run() -> State[Interrupted] | None:
        try:
            done.append(work())
        except Interrupted as interruption:
            interruptions.append(interruption)
            return Cancelled(message=str(interruption), data=interruption)
        return None

    run()
    if interruptions:
        raise interruptions[0]
    return done[0]


class _InFlow(job.Around):
    """Makes each step of the job a task of the current flow run, and shows there what happens."""

    at_once = False

    def __init__(self) -> None:
        self.name = runtime.flow_run.name or ""

    def step(self, name: str, work: Callable[[], _R]) -> _R:
        return as_task(name, work)

    def waiting(self) -> AbstractContextManager[Callable[[str], None]]:
        return waiting(runtime.flow_run.id)

    def built(self, run: Run) -> None:
        address = ""
        if run.page.run_id:
            # Close it: an open tracker holds the record that the training has to send.
            with closing(attached(run)) as tracker:
                # A database has no pages of its own: the command serves them.
                address = tracker.run_url or run.ui_command
        register_as = run.config.checkpoint.register_as
        shown = [run.page.recipe, run.page.devices, *filter(None, [register_as])]
        show_run(runtime.flow_run.id, run.folder.name, shown, address)
        if address and runtime.deployment.id:
            print(f"MLflow: {address}", flush=True)


def _show(report: Report, settings: Settings) -> None:
    """Print the report, and show it as artifacts of the flow run."""
    print(report.text, flush=True)
    folder = settings.runs_dir / report.run_name
    with tolerating_outage(f"Prefect's artifacts could not be written; the report is in {folder}"):
        metrics = [{"metric": name, "value": value} for name, value in report.metrics.items()]
        create_table_artifact(metrics, key="metrics", description="Validation metrics")
        if report.splits:
            rows = [row.table_row() for row in report.splits]
            create_table_artifact(rows, key="splits", description="Rows of a batch on each replica")
        text = f"```\n{report.text.strip()}\n```"
        create_markdown_artifact(text, key="result", description=report.run_name)


def trained(
    config: ExperimentConfig,
    stop: StopRequest,
    *,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
    prepared: str | None = None,
) -> Report:
    """Train in the current flow run, as `run_job` does. If it was started before (it gave way, or its worker
    died), continue from its checkpoint.

    Args:
        config: the experiment.
        stop: asked by signals, by cancelling in Prefect, and by others who want the GPUs.
        run_name: name of the run (default: the flow run's).
        resume: "latest", or a run's name.
        tags: more tags for the MLflow run.
        prepared: folder of the prepared data, if the flow run has prepared it already.

    Raises Interrupted when it has to stop before the end.
    """
    settings, flow_run_id = load_settings(), runtime.flow_run.id
    # A flow run that is started again finds its run only by this tag of the run.
    own = find_tagged_run(settings, FLOW_RUN_TAG, flow_run_id)
    resume = resume or own
    while own and alive(settings.runs_dir / own):
        stop.obey("while its last start wrote a checkpoint")
        time.sleep(_LOOK_EVERY_S)
    report = job.run_job(
        config,
        settings,
        run_name=run_name,
        resume=resume,
        tags=_tags() | (tags or {}),
        stop=stop,
        prepared=prepared,
        around=_InFlow(),
    )
    _show(report, settings)
    return report


def _tags() -> dict[str, str]:
    run, deployment = runtime.flow_run, runtime.deployment
    found = {
        FLOW_RUN_TAG: run.id,
        "prefect.flow_run_name": run.name,
        "prefect.deployment_id": deployment.id,
        "mlflow.source.name": "train-hybrid",
        # Without a deployment the server may be a temporary one: it ends with the run, and a link to it would
        # be dead.
        "prefect.flow_run_url": run.ui_url if deployment.id else None,
    }
    with suppress(*REFUSED):  # only the name needs a request to the server, which may be unreachable
        found["prefect.deployment_name"] = deployment.name
    return {name: str(value) for name, value in found.items() if value}
