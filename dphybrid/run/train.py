"""The main job as five plain functions - prepare, build, train, evaluate, report - and `run_job`, which calls
them in turn.

The flow and the command line share them. A run is a folder: `run.json` (its description), `checkpoints/`,
`result.json`, `splits.txt`, `report.json`; its MLflow run shows the same, for comparing runs.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.run.build import build_run, prepare_data, resumed_replicas
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, running
from dphybrid.run.leasing import giving_way, leased_devices
from dphybrid.run.pages import MetricsPage, Report, ResultPage
from dphybrid.run.report import attached, report_run
from dphybrid.run.trainer import train_here
from dphybrid.training.callbacks import Callback
from dphybrid.training.checkpoint import load_weights, verify_checkpoint
from dphybrid.training.loop import evaluate, validation_outputs
from dphybrid.training.metrics import Task, constant_prediction
from dphybrid.util.errors import UserError
from dphybrid.util.files import disk_errors_told
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals


def run_job(
    config: ExperimentConfig,
    settings: Settings,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
    stop: StopRequest | None = None,
    callbacks: Sequence[Callback] = (),
) -> Report:
    """Prepare, build, train, evaluate and report in this process.

    stop: lets other threads ask the run to stop; signals always do. callbacks: called after each epoch,
    before those that train.callbacks names. Raises UserError before work starts, Interrupted on request.
    """
    stop = stop or StopRequest()
    # A signal ends preparation, or the wait for GPUs, at once: nothing is lost. Training finishes its step
    # first, hence the second `stop_signals` below.
    with stop_signals(stop, at_once=True), ExitStack() as held:
        experiment = prepare_data(config, settings, callbacks, run_name=run_name)
        stop.obey("before it was built")
        replicas = resumed_replicas(experiment, resume)
        name = run_name or resume or experiment.recipe.name
        # Keep the lease until the report is written: the evaluation uses the GPUs, too.
        devices = held.enter_context(leased_devices(config, settings, run=name, replicas=replicas, stop=stop))
        with giving_way(devices, settings, stop), stop_signals(stop):
            all_tags = devices.tags | (tags or {})
            run = build_run(experiment, devices.text, run_name=run_name, resume=resume, tags=all_tags)
            with closing_run(run):
                train_run(run, experiment, stop, callbacks)
        # Outside the inner signal handler: an evaluation has no step to finish, so a signal ends it at once.
        with closing_run(run):
            evaluate_run(run, experiment)
            return report_run(run, experiment)


@contextmanager
def closing_run(run: Run) -> Iterator[None]:
    """Hold the run's lock during the block; end the MLflow run as KILLED if the block is interrupted, and as
    FAILED if it fails.

    Writes the run's name into the Interrupted. Raises UserError when another process runs the run, or when
    the disk is full.
    """
    with running(run.folder), disk_errors_told("then continue with --resume"):
        try:
            yield
        except BaseException as error:
            if isinstance(error, Interrupted):
                error.run = run.folder.name  # `go_on_later` resumes the run by it
            # Interrupted is a KeyboardInterrupt, not an Exception: the run was asked to end and did not fail.
            attached(run).finish("FAILED" if isinstance(error, Exception) else "KILLED")
            raise


def train_run(
    run: Run,
    experiment: Experiment,
    stop: StopRequest,
    callbacks: Sequence[Callback] = (),
    meeting: object = None,
) -> ResultPage:
    """Train a built run to its end, from its latest checkpoint if it has one; return the page `result.json`.

    callbacks: in addition to those that train.callbacks names. meeting: where a cluster's machines meet.

    Raises Interrupted when `stop` was asked: once the model is built and its checkpoint loaded, or after a
    checkpoint. Raises UserError when the loss is no longer finite.
    """
    stop.obey("before training; --resume continues it")
    if experiment.engine.launch(run.folder, run.page.devices, experiment.settings, stop, meeting):
        return ResultPage.read(run.folder / "result.json")
    return train_here(run, experiment, stop, callbacks)


def evaluate_run(run: Run, experiment: Experiment) -> dict[str, float]:
    """Evaluate the best checkpoint on the validation rows, and on test rows if the data has any
    (`test_...`); log all metrics as `final_...`."""
    data, task, mapped = experiment.data, experiment.task, experiment.engine.mapped
    best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
    gc.collect()  # frames of torch's lazy imports may keep the trained table alive, and two may not fit
    model = experiment.unfilled(run.page.devices, mapped)
    try:
        verify_checkpoint(best)
    except UserError as damage:  # not replaced automatically: the next best checkpoint is another model
        raise UserError(
            f"the run's best checkpoint is damaged: {damage}; remove {best} and run again with --resume "
            f"{run.folder.name} to use the best of the others"
        ) from damage
    load_weights(best, model, mapped)
    batch_size = experiment.config.train.batch_size
    outputs = validation_outputs(model, data.dataset("valid"), batch_size, task)
    metrics, charts = task.compute(outputs), task.charts(outputs) if task.charts else []
    if "test" in data.parts:
        tested = evaluate(model, data.dataset("test"), batch_size, task)
        metrics |= {f"test_{name}": value for name, value in tested.items()}
    own = task.baselines(outputs) if task.baselines else constant_prediction(outputs, task)
    baselines = experiment.recipe.baselines(data) or own
    page = MetricsPage(metrics=metrics, charts=list(charts), beside=_beside(metrics, baselines, task))
    page.write(run.folder / "metrics.json")
    with closing(attached(run)) as tracker:
        tracker.log_summary({f"final_{name}": value for name, value in metrics.items()})
        for which, values in baselines.items():
            where = f"baseline_{which.replace(' ', '_')}"
            tracker.log_summary({f"{where}_{name}": value for name, value in values.items()})
    return metrics


def _beside(metrics: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]], task: Task) -> str:
    """Return a text that compares the run with its baselines in the task's deciding metric."""
    sign = 1 if task.higher_is_better else -1
    return ", ".join(
        f"{which} {task.metric} {values[task.metric]:.4f} "
        f"(this run is {abs(gain):.4f} {'better' if gain >= 0 else 'WORSE'})"
        for which, values in baselines.items()
        for gain in [sign * (metrics[task.metric] - values[task.metric])]
    )


__all__ = [
    "Report",
    "build_run",
    "closing_run",
    "evaluate_run",
    "prepare_data",
    "report_run",
    "resumed_replicas",
    "run_job",
    "train_run",
]
