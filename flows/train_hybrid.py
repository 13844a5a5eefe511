"""The flow `train-hybrid`: prepare -> build -> train -> evaluate -> report.

`python -m flows.train_hybrid` runs it in this process; no server is needed. Tasks pass paths; the work is in `dphybrid.job`.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from prefect import flow, runtime, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from dphybrid import job
from dphybrid.cli import TRAIN_HELP, Parser, add_train_flags, config_from_args, run_cli
from dphybrid.config import ExperimentConfig
from dphybrid.config_sources import apply_overrides
from dphybrid.errors import UserError
from dphybrid.runs import find_tagged_run
from dphybrid.settings import load_settings
from dphybrid.training.stop import Interrupted
from flows.guard import watched_flow_run

FLOW_RUN_TAG = "prefect.flow_run_id"


@task(name="prepare", cache_policy=NO_CACHE)
def prepare(config: ExperimentConfig) -> str:
    """Make the prepared data; return its folder."""
    return job.prepare_data(config, load_settings())


@task(name="build", cache_policy=NO_CACHE)
def build(
    config: ExperimentConfig, prepared: str, run_name: str | None, resume: str | None, tags: dict[str, str], links: dict[str, str]
) -> str:
    """Check the model and open its MLflow run; return the run folder."""
    return job.build_run(config, load_settings(), prepared, run_name=run_name, resume=resume, tags=tags, links=links)


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
) -> job.Report:
    """Train a hybrid model and record its splits, timings and checkpoints in MLflow.

    config: the experiment; the recipe sets what is not given. overrides: single values on top, such as `train.batch_size=512`.
    run_name: name of the run (default: recipe, devices, time). resume: "latest", or a run's name, to go on from its newest checkpoint.
    """
    config = apply_overrides(config, overrides)
    flow_run_id = runtime.flow_run.id
    if resume is None and (runtime.flow_run.run_count or 0) > 1:  # a retry of this very flow run
        resume = find_tagged_run(load_settings(), FLOW_RUN_TAG, flow_run_id)
    prepared = prepare(config)
    folder = build(config, prepared, run_name, resume, _tags(), _links())
    try:
        with job.closing_run(folder, load_settings()), watched_flow_run(flow_run_id):
            train(folder)
            evaluate(folder)
            return report(folder)
    except Interrupted as interruption:
        if interruption.signal_number == signal.SIGTERM:
            raise TerminationSignal(signal=signal.SIGTERM) from interruption
        raise


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


def _start_embedded_server() -> None:
    """Start Prefect's temporary server, where one is needed, so that Ctrl-C ends the training and not the server below it.

    A terminal sends Ctrl-C to every process started from it. A process inherits the signals that its starting thread has blocked.
    """
    if PREFECT_API_URL.value() or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        return
    from prefect.server.api.server import SubprocessASGIServer

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        SubprocessASGIServer().start()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(start).result()


def _not_told_already(record: logging.LogRecord) -> bool:
    """Leave out the tracebacks of what `run_cli` tells in one message."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, UserError | KeyboardInterrupt)


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
        # Lines go straight to the terminal, and the flow's heartbeat, which only a standing server reads, would cost a second at the end.
        for name in ("prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).addFilter(_not_told_already)
        _start_embedded_server()
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            done = train_hybrid.with_options(log_prints=False)(config=config, run_name=args.run_name, resume=resume)
        print(done.text)
        if report_path:
            report_path.write_text(done.model_dump_json(indent=1), encoding="utf-8")
        return 0

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main())
