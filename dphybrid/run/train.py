"""The main job as five plain functions - prepare, build, train, evaluate, report - and `run_job`, which calls
them in turn.

The flow and the command line share it; a flow passes what it wraps around each step. A run is a folder:
`run.json` (its description), `checkpoints/`, `result.json`, `splits.txt`, `report.json`; its MLflow run shows
the same, for comparing runs.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.gpus.devices import giving_way, leased_devices
from dphybrid.run.build import build_run, check_job, prepare_data
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, attached
from dphybrid.run.pages import MetricsPage, Report, ResultPage
from dphybrid.run.report import report_run
from dphybrid.run.trainer import train_here
from dphybrid.training.callbacks import Callback
from dphybrid.training.checkpoint import load_weights, verify_checkpoint
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import CONSTANT, constant_prediction
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest, stop_signals

T = TypeVar("T")


class Around:
    """What a caller wraps around the steps of a job. This class adds nothing; a flow makes each step a task
    and shows the progress.

    name: shown to others who wait for the GPUs ("": the run's). at_once: whether signals end preparation and
    waiting at once; a flow's worker sends them to its own handlers.
    """

    name = ""
    at_once = True

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
    def training(self, run: Run) -> Iterator[Sequence[Callback]]:
        """Yield more callbacks."""
        yield ()

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
    """Prepare, build, train, evaluate and report in this process. Raises UserError before work starts,
    Interrupted on request.

    Args:
        stop: Lets other threads ask the run to stop; signals always do.
        callbacks: Called after each epoch, before those that train.callbacks names.
        prepared: Folder of the data, if it is prepared already.
    """
    stop, around = stop or StopRequest(), around or Around()
    # A signal ends preparation, or the wait for GPUs, at once: nothing is lost. Training finishes its step
    # first, hence the second `stop_signals` below.
    with stop_signals(stop, at_once=True) if around.at_once else nullcontext(), ExitStack() as held:
        if resume:
            check_job(config, settings, callbacks, run_name)
            experiment = Experiment.continuing(resume, config, settings)
            print(f"Prepared data: {experiment.data.path}", flush=True)
        elif prepared is None:
            experiment = around.step("prepare", lambda: prepare_data(config, settings, callbacks, run_name))
        else:
            experiment = Experiment.open(config, settings, prepared)
        stop.obey("before it was built")
        previous = experiment.found
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

        experiment = replace(experiment, devices=devices.text)

        def build() -> Experiment:
            every = devices.tags | (tags or {})
            built = held.enter_context(build_run(experiment, run_name=run_name, tags=every, links=links))
            around.built(built.run)
            return built

        def train() -> ResultPage:
            with around.training(built.run) as more:
                return train_run(built, stop, [*callbacks, *more])

        def report() -> Report:
            done = report_run(built)
            around.reported(done)
            return done

        with giving_way(devices, settings, stop), stop_signals(stop):
            built = around.step("build", build)
            around.step("train", train)
        # Outside the inner signal handler: an evaluation has no step to finish, so a signal ends it at once.
        around.step("evaluate", lambda: evaluate_run(built))
        stop.obey("after its evaluation")
        return around.step("report", report)


def train_run(
    experiment: Experiment,
    stop: StopRequest,
    callbacks: Sequence[Callback] = (),
) -> ResultPage:
    """Train a built run to its end, from its latest checkpoint if it has one; return the page `result.json`.

    callbacks: in addition to those that train.callbacks names.

    Raises Interrupted when `stop` was asked: once the model is built and its checkpoint loaded, or after a
    checkpoint. Raises UserError when the loss is no longer finite.
    """
    stop.obey("before training; --resume continues it")
    folder = experiment.run.folder
    if experiment.engine.launch(folder, experiment.settings, stop):
        return ResultPage.read(folder / "result.json")
    return train_here(experiment, stop, callbacks)


def evaluate_run(experiment: Experiment) -> dict[str, float]:
    """Evaluate the best checkpoint on the validation rows (logged as `final_...`) and, once, on the test rows
    if the data has any (`test/...`). Return the validation metrics."""
    run, data, task, mapped = experiment.run, experiment.data, experiment.task, experiment.engine.mapped
    best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
    # The optimizers' states go first, so that the evaluation has their memory.
    gc.collect()
    model, experiment.built.model = experiment.built.model, None
    if model is None:  # trained by other processes
        model = experiment.unfilled(experiment.devices, mapped)
    try:
        verify_checkpoint(best)
    except UserError as damage:  # not replaced automatically: the next best checkpoint is another model
        raise UserError(
            f"the run's best checkpoint is damaged: {damage}; remove {best} and run again with --resume "
            f"{run.folder.name} to use the best of the others"
        ) from damage
    load_weights(best, model, mapped)
    batch_size = experiment.config.train.batch_size
    outputs, experiment.built.outputs = experiment.built.outputs, {}
    outputs = outputs or validation_outputs(model, data.dataset("valid"), batch_size, task)
    metrics, tested, drawn = task.compute(outputs), dict[str, float](), outputs
    if "test" in data.parts:
        drawn = validation_outputs(model, data.dataset("test"), batch_size, task)
        tested = task.compute(drawn)
    charts = task.charts(drawn) if task.charts else []
    floor = experiment.recipe.floor(data)
    if floor is not None:
        baselines = {CONSTANT: task.compute(floor)}
    else:
        baselines = task.baselines(outputs) if task.baselines else constant_prediction(outputs, task)
    page = MetricsPage(
        metrics=metrics,
        test=tested,
        baselines={which: dict(values) for which, values in baselines.items()},
        charts=list(charts),
    )
    page.write(run.folder / "metrics.json")
    with closing(attached(run)) as tracker:
        tracker.log_summary({f"final_{name}": value for name, value in metrics.items()})
        tracker.log_summary({f"test/{name}": value for name, value in tested.items()})
        for which, values in baselines.items():
            where = f"baseline_{which.replace(' ', '_')}"
            tracker.log_summary({f"{where}_{name}": value for name, value in values.items()})
    return metrics


__all__ = [
    "Report",
    "build_run",
    "evaluate_run",
    "prepare_data",
    "report_run",
    "run_job",
    "train_run",
]
