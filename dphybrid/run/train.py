"""The main job as five plain functions - prepare, build, train, evaluate, report - and `run_job`, which calls
them in turn.

The flow and the command line share them. A run is a folder: `run.json` (what it is), `checkpoints/`,
`result.json`, `splits.txt`, `report.json`; its MLflow run holds the same for people to
compare.
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

    stop: by which others can ask the run to stop; signals do in any case. callbacks: called after each epoch,
    before those that train.callbacks names. Raises UserError before work starts, Interrupted on request.
    """
    stop = stop or StopRequest()
    # What prepares or waits for GPUs loses nothing when it is cut off. A training finishes its step first:
    # thus `stop_signals` once more, below.
    with stop_signals(stop, at_once=True), ExitStack() as held:
        experiment = prepare_data(config, settings, callbacks, run_name=run_name)
        stop.obey("before it was built")
        replicas = resumed_replicas(experiment, resume)
        name = run_name or resume or experiment.recipe.name
        # Leased until the report is written, as the evaluation computes on them, too.
        devices = held.enter_context(leased_devices(config, settings, run=name, replicas=replicas, stop=stop))
        with giving_way(devices, settings, stop), stop_signals(stop):
            all_tags = devices.tags | (tags or {})
            run = build_run(experiment, devices.text, run_name=run_name, resume=resume, tags=all_tags)
            with closing_run(run):
                train_run(run, experiment, stop, callbacks)
        # Outside of the inner handler of signals: an evaluation has no step to finish, and ends at once.
        with closing_run(run):
            evaluate_run(run, experiment)
            return report_run(run, experiment)


@contextmanager
def closing_run(run: Run) -> Iterator[None]:
    """End the MLflow run as KILLED when the block is interrupted, with the run's name in the Interrupted, and
    as FAILED when it fails.

    Nobody else runs it meanwhile. Raises UserError when somebody does, or when the disk takes no more.
    """
    with running(run.folder), disk_errors_told("then go on with --resume"):
        try:
            yield
        except BaseException as error:
            if isinstance(error, Interrupted):
                error.run = run.folder.name
            # Interrupted is a KeyboardInterrupt: asked to end, which is no failure.
            attached(run).finish("FAILED" if isinstance(error, Exception) else "KILLED")
            raise


def train_run(
    run: Run,
    experiment: Experiment,
    stop: StopRequest,
    callbacks: Sequence[Callback] = (),
    meeting: object = None,
) -> ResultPage:
    """Train a built run to its end, from its latest checkpoint where it has one; return what `result.json`
    holds.

    callbacks: beside those that train.callbacks names. meeting: of a cluster's machines.

    Raises Interrupted when `stop` was asked: as soon as the model is built and its checkpoint loaded, or
    after a checkpoint. Raises UserError when the loss is no longer a number.
    """
    stop.obey("before it was trained; it goes on with --resume")
    if experiment.engine.launch(run.folder, run.page.devices, experiment.settings, stop, meeting):
        return ResultPage.read(run.folder / "result.json")
    return train_here(run, experiment, stop, callbacks)


def evaluate_run(run: Run, experiment: Experiment) -> dict[str, float]:
    """Evaluate the best checkpoint on the validation rows, and on test rows where the data has some
    (`test_...`); log it all as `final/...`."""
    data, task, mapped = experiment.data, experiment.task, experiment.engine.mapped
    best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
    gc.collect()  # frames of torch's lazy imports may hold the trained table: two would not fit
    model = experiment.unfilled(run.page.devices, mapped)
    try:
        verify_checkpoint(best)
    except UserError as damage:  # nothing takes its place by itself: it would be another model
        raise UserError(
            f"the run's best checkpoint is damaged: {damage}; remove {best} and give --resume "
            f"{run.folder.name}: the best of the others takes its place"
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
        tracker.log_summary({f"final/{name}": value for name, value in metrics.items()})
        for which, values in baselines.items():
            where = f"baseline/{which.replace(' ', '_')}"
            tracker.log_summary({f"{where}/{name}": value for name, value in values.items()})
    return metrics


def _beside(metrics: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]], task: Task) -> str:
    """Say what the run adds to its baselines, in the deciding metric: positive where it is better."""
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
