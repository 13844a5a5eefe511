"""Shared parts of the flows: the steps of the main job as Prefect tasks, and `trained`, which calls them in
turn.

Tasks pass each other paths, never models or data; the work is in `dphybrid.run.train`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import runtime, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import load_settings
from dphybrid.orchestration.machines import gathered, other_workers, over_machines
from dphybrid.orchestration.queueing import REFUSED, giving_back, shown_waiting
from dphybrid.orchestration.shown import show_run, shown_progress, tolerating_outage
from dphybrid.orchestration.supervised import watched_flow_run
from dphybrid.run import train as job
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import find_tagged_run, read_run
from dphybrid.run.leasing import giving_way, leased_devices
from dphybrid.run.report import attached
from dphybrid.util.files import disk_errors_told
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals

FLOW_RUN_TAG = "prefect.flow_run_id"

# Inside the tasks, although `closing_run` does the same around them: Prefect logs the traceback of any
# exception but a UserError that leaves a task.
_disk_errors_told = disk_errors_told("then continue with --resume")

_P = ParamSpec("_P")
_R = TypeVar("_R")


def step(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function a Prefect task that is called like the function.

    An Interrupted leaves the call as it would leave the function, and the task ends as Cancelled; Prefect
    alone would log a crash.
    """

    def made(work: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(work)
        def ending(*args: _P.args, **named: _P.kwargs) -> "_R | State[Any]":
            try:
                return work(*args, **named)
            except Interrupted as interruption:
                return Cancelled(message=str(interruption), data=interruption)

        as_task = task(name=name, cache_policy=NO_CACHE)(ending)

        @wraps(work)
        def call(*args: _P.args, **named: _P.kwargs) -> _R:
            done: Any = as_task(*args, **named)
            if isinstance(done, State):
                interruption: Any = done.data
                raise interruption.result  # not done.result(), which raises an exception of its own
            result: _R = done
            return result

        return call

    return made


@step("prepare")
def prepare(config: ExperimentConfig, here: int = 0, run_name: str | None = None) -> str:
    """Make the prepared data; return its folder."""
    return str(job.prepare_data(config, load_settings(), here=here, run_name=run_name).data.path)


@step("build")
def build(
    config: ExperimentConfig,
    prepared: str,
    devices: str,
    run_name: str | None,
    resume: str | None,
    tags: dict[str, str],
    links: dict[str, str],
) -> str:
    """Check the model and open its MLflow run; return the run folder."""
    settings = load_settings()
    experiment = Experiment.open(config, settings, prepared)
    run = job.build_run(experiment, devices, run_name=run_name, resume=resume, tags=tags, links=links)
    address = ""
    if run.page.run_id:
        # Close it: an open tracker holds the record that `train` has to send.
        with closing(attached(run)) as tracker:
            address = tracker.run_url
    shown = [config.recipe, devices, *filter(None, [config.checkpoint.register_as])]
    show_run(runtime.flow_run.id, run.folder.name, shown, address)
    if address and runtime.deployment.id:
        print(f"MLflow: {address if address.startswith('http') else run.ui_command}", flush=True)
    return str(run.folder)


@step("train")
@_disk_errors_told
def train(run_folder: str, stop: StopRequest, others: list[str]) -> dict[str, object]:
    """Train to the end, with the machines of the workers `others`; return the fields of
    `result.json`."""
    settings = load_settings()
    with (
        gathered(others, run_folder, settings) if others else nullcontext() as meeting,
        shown_progress(runtime.flow_run.id) as on_epoch,
    ):
        run = read_run(run_folder, settings)
        return job.train_run(run, run.experiment(), stop, [on_epoch], meeting).model_dump()


@step("evaluate")
@_disk_errors_told
def evaluate(run_folder: str) -> dict[str, float]:
    """Evaluate the best checkpoint on the validation rows."""
    run = read_run(run_folder, load_settings())
    return job.evaluate_run(run, run.experiment())


@step("report")
@_disk_errors_told
def report(run_folder: str) -> job.Report:
    """Write the report and the flow run's artifacts."""
    run = read_run(run_folder, load_settings())
    done = job.report_run(run, run.experiment())
    print(done.text, flush=True)
    with tolerating_outage(f"Prefect's artifacts could not be written; the report is in {run_folder}"):
        metrics = [{"metric": name, "value": value} for name, value in done.metrics.items()]
        create_table_artifact(metrics, key="metrics", description="Validation metrics")
        if done.splits:
            rows = [row.table_row() for row in done.splits]
            create_table_artifact(rows, key="splits", description="Rows of a batch on each replica")
        create_markdown_artifact(f"```\n{done.text.strip()}\n```", key="result", description=done.run_name)
    return done


def trained(
    config: ExperimentConfig,
    stop: StopRequest,
    *,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
    prepared: str | None = None,
    nodes: int = 1,
    machines: Sequence[str] = (),
) -> job.Report:
    """Train in the current flow run. If it was started before (it gave way, or its worker died), continue
    from its checkpoint.

    Args:
        config: the experiment.
        stop: asked by signals, by cancelling in Prefect, and by others who want the GPUs.
        run_name: name of the run (default: the flow run's).
        resume: "latest", or a run's name.
        tags: more tags for the MLflow run.
        prepared: folder of the prepared data, if the flow run has prepared it already.
        nodes: number of machines that train together, see `dphybrid.orchestration.machines`.
        machines: names of their workers; empty: any.

    Raises Interrupted when it has to stop before the end.
    """
    settings, flow_run_id = load_settings(), runtime.flow_run.id
    config = over_machines(config, nodes, settings)
    # A flow run that is started again finds its run only by this tag of the run.
    resume = resume or find_tagged_run(settings, FLOW_RUN_TAG, flow_run_id)
    with watched_flow_run(flow_run_id, stop), ExitStack() as held:
        others = other_workers(nodes, machines, settings, stop) if nodes > 1 else []
        prepared = prepared or prepare(config, config.cluster.on_each(nodes), run_name)
        stop.obey("before it was built")
        replicas = job.resumed_replicas(Experiment.open(config, settings, prepared), resume)
        back = giving_back(stop, settings.gpu_give_back_s)
        with shown_waiting(flow_run_id) as report_wait, back:
            name = run_name or runtime.flow_run.name or config.recipe
            leased = leased_devices(
                config, settings, run=name, replicas=replicas, on_wait=report_wait, stop=stop
            )
            devices = held.enter_context(leased)
        all_tags = _tags() | devices.tags | (tags or {})
        if others:
            all_tags |= {"dphybrid.nodes": str(nodes), "dphybrid.other_machines": ", ".join(others)}
        with giving_way(devices, settings, stop), stop_signals(stop):
            folder = build(config, prepared, devices.text, run_name, resume, all_tags, _links())
            with job.closing_run(read_run(folder, settings)):
                train(folder, stop, others)
        with job.closing_run(read_run(folder, settings)):
            evaluate(folder)
            stop.obey("after its evaluation")
            return report(folder)


def _tags() -> dict[str, str]:
    run, deployment = runtime.flow_run, runtime.deployment
    found = {
        FLOW_RUN_TAG: run.id,
        "prefect.flow_run_name": run.name,
        "prefect.deployment_id": deployment.id,
        "mlflow.source.name": "train-hybrid",
    }
    with suppress(*REFUSED):  # only the name needs a request to the server, which may be unreachable
        found["prefect.deployment_name"] = deployment.name
    return {name: str(value) for name, value in found.items() if value}


def _links() -> dict[str, str]:
    # Without a deployment the server may be a temporary one: it ends with the run, and a link to it would be
    # dead.
    address = runtime.flow_run.ui_url if runtime.deployment.id else None
    return {"Prefect flow run": address} if address else {}
