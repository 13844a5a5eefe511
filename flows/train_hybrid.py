"""The flow `train-hybrid`: prepare -> build -> train -> evaluate -> report.

`python -m flows.train_hybrid` runs it in this process; no server is needed. Tasks pass paths; the work is in `dphybrid.jobs.train`.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx
from prefect import flow, runtime, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException

from dphybrid.cli.flags import TRAIN_HELP, Parser, add_train_flags, config_from_args, run_cli
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import load_settings
from dphybrid.config.sources import apply_overrides
from dphybrid.gpus.leasing import leased_devices
from dphybrid.gpus.politeness import giving_way, go_on_later
from dphybrid.jobs import train as job
from dphybrid.jobs.runs import find_tagged_run
from dphybrid.orchestration.embedded import in_this_process
from dphybrid.orchestration.guard import watched_flow_run
from dphybrid.orchestration.queueing import shown_waiting, too_late
from dphybrid.orchestration.supervised import supervised
from dphybrid.util.stop import Interrupted

FLOW_RUN_TAG = "prefect.flow_run_id"


@task(name="prepare", cache_policy=NO_CACHE)
def prepare(config: ExperimentConfig) -> str:
    """Make the prepared data; return its folder."""
    return job.prepare_data(config, load_settings())


@task(name="build", cache_policy=NO_CACHE)
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
    return job.build_run(config, load_settings(), prepared, devices, run_name=run_name, resume=resume, tags=tags, links=links)


@task(name="train", cache_policy=NO_CACHE)
def train(run_folder: str) -> dict[str, Any]:
    """Train to the end; return where the checkpoints are."""
    return job.train_run(run_folder, load_settings())


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(run_folder: str) -> dict[str, float]:
    """Evaluate the best checkpoint on the held-out rows."""
    return job.evaluate_run(run_folder, load_settings())


@task(name="report", cache_policy=NO_CACHE)
def report(run_folder: str) -> job.Report:
    """Write the report and the flow run's artifacts."""
    done = job.report_run(run_folder, load_settings())
    try:
        _publish(done)
    except (httpx.HTTPError, PrefectException) as error:
        print(f"Prefect's artifacts could not be written ({error}); the report is in {run_folder}")
    return done


def _publish(done: job.Report) -> None:
    create_link_artifact(done.run_url, link_text=f"MLflow run {done.run_name}", key="mlflow-run")
    create_table_artifact(
        [{"metric": name, "value": value} for name, value in done.metrics.items()], key="metrics", description="Held-out metrics"
    )
    if done.splits:
        create_table_artifact(done.splits, key="splits", description="What each replica got of a batch")
    create_markdown_artifact(f"```\n{done.text.strip()}\n```", key="result", description=done.run_name)


@flow(name="train-hybrid", log_prints=True)
def train_hybrid(
    config: ExperimentConfig = ExperimentConfig(),  # noqa: B008 - frozen, and the form shows it
    overrides: list[str] = [],  # noqa: B006 - never changed, and the form shows it
    run_name: str | None = None,
    resume: str | None = None,
    skip_if_late_min: float = 0,
) -> job.Report | State:
    """Train a hybrid model and record its splits, timings and checkpoints in MLflow.

    config: the experiment; the recipe sets what is not given. overrides: single values on top, such as `train.batch_size=512`.
    run_name: name of the run (default: recipe, devices, time). resume: "latest", or a run's name, to go on from its newest checkpoint.
    skip_if_late_min: minutes after which a scheduled run that could not start in time is left out; 0: never.
    """
    if late := too_late(skip_if_late_min):
        return late
    with supervised():
        return trained(apply_overrides(config, overrides), run_name=run_name, resume=resume)


def trained(
    config: ExperimentConfig, *, run_name: str | None = None, resume: str | None = None, tags: dict[str, str] | None = None
) -> job.Report:
    """Train in the flow run at hand, from where it stood if it began before: it gave way, or its worker died.

    tags: more tags for the MLflow run. Raises Interrupted when it has to stop before the end.
    """
    settings, flow_run_id = load_settings(), runtime.flow_run.id
    resume = resume or find_tagged_run(settings, FLOW_RUN_TAG, flow_run_id)
    prepared = prepare(config)
    replicas = job.resumed_replicas(config, settings, prepared, resume)
    with ExitStack() as held:
        with shown_waiting(flow_run_id) as tell:
            name = run_name or runtime.flow_run.name or config.recipe
            devices = held.enter_context(leased_devices(config, settings, run=name, replicas=replicas, on_wait=tell))
        folder = build(config, prepared, devices.text, run_name, resume, _tags() | devices.tags | (tags or {}), _links())
        with job.closing_run(folder, settings), watched_flow_run(flow_run_id):
            with giving_way(devices, settings):
                train(folder)
            evaluate(folder)
            return report(folder)


def _tags() -> dict[str, str]:
    run, deployment = runtime.flow_run, runtime.deployment
    found = {
        FLOW_RUN_TAG: run.id,
        "prefect.flow_run_name": run.name,
        "prefect.deployment_id": deployment.id,
        "prefect.deployment_name": deployment.name,
        "mlflow.source.name": "train-hybrid",
    }
    return {name: str(value) for name, value in found.items() if value}


def _links() -> dict[str, str]:
    # An embedded server is gone when the run has ended, so its address would lead nowhere.
    address = runtime.flow_run.ui_url if runtime.deployment.id else None
    return {f"Prefect flow run {runtime.flow_run.name}": address} if address else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the flow in this process; return the exit code."""
    parser = Parser(
        prog="python -m flows.train_hybrid",
        description="Train a hybrid model as a Prefect flow, in this process.",
        epilog=TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_train_flags(parser)
    args = parser.parse_args(argv)

    def run() -> int:
        config, _, resume, report_path = config_from_args(args)
        with in_this_process() as stop_server:
            try:
                done = train_hybrid.with_options(log_prints=False)(config=config, run_name=args.run_name, resume=resume)
            except Interrupted as interruption:
                if interruption.requeue:
                    go_on_later(interruption, load_settings(), stop_server)
                raise
        assert isinstance(done, job.Report)  # only a scheduled run can be skipped
        print(done.text)
        if report_path:
            report_path.write_text(done.model_dump_json(indent=1), encoding="utf-8")
        return 0

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main())
