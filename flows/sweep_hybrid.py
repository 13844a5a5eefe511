"""The flow `sweep-hybrid`: train a grid of values, or search among them, as many at once as the GPUs allow;
one page compares the results.

The work is in `dphybrid.lifecycle.sweep`; `dphybrid sweep` does it without Prefect.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prefect import flow, runtime, task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import TerminationSignal
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.lifecycle.sweep import (
    Cell,
    CellFailed,
    Reports,
    begin_sweep,
    compare_sweep,
    failures,
    make_grid,
    run_cell,
    sweep_folder,
    write_sweep,
)
from dphybrid.orchestration.forms import experiment
from dphybrid.orchestration.queueing import too_late
from dphybrid.orchestration.shown import show_run, tolerating_outage
from dphybrid.orchestration.supervised import supervised, watched_flow_run
from dphybrid.recipes.configs import AnyExperiment, build_config
from dphybrid.run.train import Report
from dphybrid.util.stop import StopRequest

if TYPE_CHECKING:
    from dphybrid.lifecycle.search import Search  # imports optuna, which a grid does not need


def _should_retry(_task: Any, _run: Any, state: State) -> bool:
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, CellFailed) and error.final)


@task(
    name="cell",
    cache_policy=NO_CACHE,
    task_run_name="{cell.name}",
    retry_condition_fn=_should_retry,
    retry_delay_seconds=1,
)
def _train_cell(cell: Cell, sweep: str, tags: dict[str, str], stop: StopRequest) -> Report:
    """Train one cell in its own process."""
    settings = load_settings()
    context = TaskRunContext.get()
    if context and context.task_run.run_count > 1:
        print(f"{cell.name}: retrying", flush=True)
    return run_cell(cell, sweep_folder(sweep, settings), settings, sweep, tags, stop)


@flow(name="sweep-hybrid", log_prints=True)
def sweep_hybrid(
    grid: dict[str, Any],
    data_path: str | None = None,
    label: str | None = None,
    devices: str | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    overrides: list[str] = [],  # noqa: B006 - never changed, and the form shows it
    sweep: str | None = None,
    at_once: int = 0,
    retries: int = 1,
    trials: int = 0,
    prune: bool = True,
    config: AnyExperiment = build_config({}),  # noqa: B008 - frozen, and the form shows it
    skip_if_late_min: float = 0,
) -> State:
    """Train every combination of the grid's values, or search among them, and compare them on one page.

    Args:
        grid: Fields and their values, such as `{"train.batch_size": [256, 512], "devices": ["auto*1",
            "auto*2"]}`; in a search also ranges, `{"train.lr": {"low": 0.0001, "high": 0.1, "log": true}}`.
        data_path: File, folder or pattern of the data.
        label: Column to predict.
        devices: Where the blocks run: auto, auto*2 (two free GPUs), cpu, cpu*8 (eight virtual devices),
            cuda:0.
        epochs: Passes over the training split.
        batch_size: Rows of a batch over all devices together.
        lr: Learning rate of the dense blocks.
        overrides: Single values that override all others, such as `model.hidden=64`.
        sweep: Name of the sweep; the name of an earlier one continues it. Empty: the flow run's name.
        at_once: Trainings at the same time; 0: as many as there are free GPUs.
        retries: How often a failed training is tried again.
        trials: Trainings in a search, whose values Optuna chooses; 0: every combination of the grid.
        prune: End a search's training after an epoch in which it does worse than the median of the others.
        config: All other values, common to all trainings; a field left empty keeps the recipe's value.
        skip_if_late_min: Skip a scheduled run that starts more than this many minutes late; 0: never skip.
    """
    given = locals()  # first line, so these are just the parameters: the form's values by name
    if late := too_late(skip_if_late_min):
        return late
    with supervised() as stop:
        chosen, name = experiment(given), sweep or _own_name()
        if trials:
            from dphybrid.lifecycle.search import Search

            return _searched(Search(grid, trials, prune), chosen, stop, name, at_once)
        return _swept(grid, chosen, stop, name, at_once, retries)


def _searched(what: "Search", config: ExperimentConfig, stop: StopRequest, sweep: str, at_once: int) -> State:
    from dphybrid.lifecycle.search import search

    settings = load_settings()
    show_run(runtime.flow_run.id, sweep, [config.recipe], "")
    with watched_flow_run(runtime.flow_run.id, stop), _passing_on_the_end(stop):
        cells, reports = search(what, config, sweep, settings, stop, at_once, _tags())
    stop.obey("with trials left; they continue when the sweep does")
    return _reported(sweep, cells, reports, settings)


def _tags() -> dict[str, str]:
    return {"prefect.flow_run_id": str(runtime.flow_run.id), "mlflow.source.name": "sweep-hybrid"}


def _swept(
    grid: dict[str, list[Any]],
    config: ExperimentConfig,
    stop: StopRequest,
    sweep: str,
    at_once: int,
    retries: int,
) -> State:
    settings = load_settings()
    cells = make_grid(config, grid, sweep, settings)
    _, workers = begin_sweep(sweep, cells, settings, at_once)
    show_run(runtime.flow_run.id, sweep, [config.recipe], "")
    runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=workers)
    reports: dict[str, Report | str] = {}
    with watched_flow_run(runtime.flow_run.id, stop), runner, _passing_on_the_end(stop):
        train, shared = (
            _train_cell.with_options(retries=retries),
            {"sweep": sweep, "tags": _tags(), "stop": stop},
        )
        futures = [runner.submit(train, {"cell": cell, **shared}) for cell in cells]
        for cell, future in zip(cells, futures, strict=True):
            future.wait()
            result = future.state.result(raise_on_failure=False)
            reports[cell.name] = result if isinstance(result, Report) else str(result)
    stop.obey("with cells left; they continue when the sweep does")
    return _reported(sweep, cells, reports, settings)


@contextmanager
def _passing_on_the_end(stop: StopRequest) -> Iterator[None]:
    """Pass an interruption of this process on to the cells' processes, so that they write checkpoints."""
    try:
        yield
    except (TerminationSignal, KeyboardInterrupt):
        stop.ask("the end of the sweep", signal.SIGTERM)
        raise


def _reported(sweep: str, cells: list[Cell], reports: Reports, settings: Settings) -> State:
    folder = sweep_folder(sweep, settings)
    rows, file = write_sweep(folder, cells, reports)
    print(f"Results: {file}", flush=True)
    address = compare_sweep(cells, reports, sweep, settings)
    with tolerating_outage(f"Prefect's artifact could not be written; the results are in {folder}"):
        create_table_artifact(rows, key="sweep", description=f"Sweep {sweep}")
        if address:
            text = f"Comparison of {sweep}, among the artifacts of its MLflow run"
            create_link_artifact(address, link_text=text, key="comparison", description=text)
    if failed := failures(reports):
        texts = "\n".join(failed.values())
        print(texts, flush=True)
        return Failed(message=f"{len(failed)} of {len(reports)} cells failed: {texts}")
    return Completed(message=f"{len(reports)} cells trained; {address or folder}")


def _own_name() -> str:
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None:
        return f"sweep-{os.getpid()}"
    # The id keeps two flow runs of one name from sharing a sweep. A flow run that was queued again has the
    # sweep's name already, from `show_run`.
    suffix = f"-{str(run.id)[:4]}"
    return run.name if run.name.endswith(suffix) else run.name + suffix


if __name__ == "__main__":
    sys.exit("error: this flow is for deployments; `dphybrid sweep` runs a sweep in this process")
