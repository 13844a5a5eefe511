"""The main job as five plain functions - prepare, build, train, evaluate, report - and `run_job`, which calls
them in turn.

The flow and the command line share it; a flow passes what it wraps around each step. A run is a folder:
`run.json` (its description), `checkpoints/`, `result.json`, `splits.txt`, `report.json`; its MLflow run shows
the same, for comparing runs.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data.table.encoder import Encoder
from dphybrid.run.advice import advice
from dphybrid.run.build import build_run, prepare_data
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, find_run, running
from dphybrid.run.leasing import giving_way, leased_devices
from dphybrid.run.pages import MetricsPage, Report, ResultPage
from dphybrid.run.report import attached, report_run
from dphybrid.run.trainer import train_here
from dphybrid.training.callbacks import Callback
from dphybrid.training.checkpoint import load_weights, read_state, verify_checkpoint
from dphybrid.training.display import preparation_progress
from dphybrid.training.importance import importance
from dphybrid.training.loop import evaluate, validation_outputs
from dphybrid.training.metrics import Task, constant_prediction
from dphybrid.util.errors import UserError
from dphybrid.util.files import disk_errors_told
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals

T = TypeVar("T")


class Around:
    """What a caller wraps around the steps of a job. This class adds nothing; a flow makes each step a task,
    shows the progress and gathers other machines.

    name: shown to others who wait for the GPUs ("": the run's). at_once: whether signals end preparation and
    waiting at once; a flow's worker sends them to its own handlers. here: how many of a cluster's processes
    run on this machine; 0: all.
    """

    name = ""
    at_once = True
    here = 0

    def step(self, name: str, work: Callable[[], T]) -> T:
        """Do a step: prepare, build, train, evaluate or report."""
        return work()

    @contextmanager
    def waiting(self) -> Iterator[Callable[[str], None] | None]:
        """Yield the function that is called with the reason while the job waits for GPUs; None prints it."""
        yield None

    def built(self, run: Run) -> None:
        """The run has its folder and its record."""

    @contextmanager
    def training(self, run: Run) -> Iterator[tuple[Sequence[Callback], object]]:
        """Yield more callbacks, and where a cluster's machines meet."""
        yield (), None

    def reported(self, report: Report) -> None:
        """The report is written."""


def run_job(
    config: ExperimentConfig,
    settings: Settings,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
    stop: StopRequest | None = None,
    callbacks: Sequence[Callback] = (),
    links: dict[str, str] | None = None,
    prepared: str | None = None,
    around: Around | None = None,
) -> Report:
    """Prepare, build, train, evaluate and report in this process.

    stop: lets other threads ask the run to stop; signals always do. callbacks: called after each epoch,
    before those that train.callbacks names. prepared: folder of the data, if it is prepared already. Raises
    UserError before work starts, Interrupted on request.
    """
    stop, around = stop or StopRequest(), around or Around()
    # A signal ends preparation, or the wait for GPUs, at once: nothing is lost. Training finishes its step
    # first, hence the second `stop_signals` below.
    with stop_signals(stop, at_once=True) if around.at_once else nullcontext(), ExitStack() as held:
        if prepared is None:
            experiment = around.step(
                "prepare", lambda: prepare_data(config, settings, callbacks, around.here, run_name)
            )
        else:
            experiment = Experiment.open(config, settings, prepared)
        stop.obey("before it was built")
        previous = find_run(experiment, resume) if resume else None
        experiment = replace(experiment, previous=previous)
        name = run_name or around.name or resume or experiment.recipe.name
        with around.waiting() as on_wait:
            # Keep the lease until the report is written: the evaluation uses the GPUs, too.
            devices = held.enter_context(
                leased_devices(
                    config,
                    settings,
                    run=name,
                    replicas=previous.replicas if previous else 0,
                    on_wait=on_wait,
                    stop=stop,
                )
            )

        def build() -> Run:
            every = devices.tags | (tags or {})
            run = build_run(experiment, devices.text, run_name=run_name, tags=every, links=links)
            around.built(run)
            return run

        def train() -> ResultPage:
            with around.training(run) as (more, meeting):
                return train_run(run, experiment, stop, [*callbacks, *more], meeting)

        def report() -> Report:
            done = report_run(run, experiment)
            around.reported(done)
            return done

        with giving_way(devices, settings, stop), stop_signals(stop):
            run = around.step("build", build)
            with closing_run(run):
                around.step("train", train)
        # Outside the inner signal handler: an evaluation has no step to finish, so a signal ends it at once.
        with closing_run(run):
            around.step("evaluate", lambda: evaluate_run(run, experiment))
            stop.obey("after its evaluation")
            return around.step("report", report)


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
    """Evaluate the best checkpoint on the validation rows (logged as `final_...`) and, once, on the test rows
    if the data has any (`test/...`). Return the validation metrics."""
    data, task, mapped = experiment.data, experiment.task, experiment.engine.mapped
    result = ResultPage.read(run.folder / "result.json")
    best = Path(result.best_checkpoint)
    # The optimizers' states go first, so that the evaluation has their memory.
    gc.collect()
    model, experiment.built.model = experiment.built.model, None
    if model is None:  # trained by other processes
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
    outputs = validation_outputs(model, experiment.validation_rows, batch_size, task)
    metrics, charts = task.compute(outputs), task.charts(outputs) if task.charts else []
    fixed = task.given(metrics) if task.given else task
    tested = evaluate(model, data.dataset("test"), batch_size, fixed) if "test" in data.parts else {}
    own = task.baselines(outputs) if task.baselines else constant_prediction(outputs, task)
    baselines = experiment.recipe.baselines(data) or own
    lost = _importance(model, experiment)
    advised = []
    if _loses(metrics, baselines, task):
        best_epoch = read_state(best).progress.epoch
        rows = len(data.dataset("train"))
        advised = advice(experiment.config, data.manifest.facts, rows, lost, best_epoch, result.epochs)
    page = MetricsPage(
        metrics=metrics,
        test=tested,
        charts=list(charts),
        beside=_beside(metrics, baselines, task),
        importance=lost,
        advice=advised,
    )
    page.write(run.folder / "metrics.json")
    with closing(attached(run)) as tracker:
        tracker.log_summary({f"final_{name}": value for name, value in metrics.items()})
        tracker.log_summary({f"test/{name}": value for name, value in tested.items()})
        for which, values in baselines.items():
            where = f"baseline_{which.replace(' ', '_')}"
            tracker.log_summary({f"{where}_{name}": value for name, value in values.items()})
    return metrics


def _importance(model: nn.Module, experiment: Experiment) -> dict[str, float]:
    """Return how much each column of a table matters on validation rows; empty for other data."""
    folder, _ = experiment.encoder
    if folder is None or not experiment.recipe.tabular:
        return {}
    places = Encoder.load(folder).places
    # A batch as large as those of predictions: as the rows are few, their number of calls counts.
    batch_size = max(1024, experiment.config.train.batch_size)
    with preparation_progress() as progress:
        return importance(
            model, experiment.data.dataset("valid"), experiment.task, places, batch_size, progress
        )


def _loses(metrics: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]], task: Task) -> bool:
    sign = 1 if task.higher_is_better else -1
    return any(sign * (metrics[task.metric] - values[task.metric]) < 0 for values in baselines.values())


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
    "run_job",
    "train_run",
]
