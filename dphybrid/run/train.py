"""The main job as five plain functions - prepare, build, train, evaluate, report - and `run_job`, which calls
them in turn.

The flow and the command line share them. A run is a folder: `run.json` (what it is), `checkpoints/`,
`result.json`, `splits.json`, `splits.txt`, `report.json`; its MLflow run holds the same for people to
compare.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.run.build import build_run, prepare_data, resumed_replicas
from dphybrid.run.evaluate import evaluate_run
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, running
from dphybrid.run.leasing import giving_way, leased_devices
from dphybrid.run.pages import Report, ResultPage
from dphybrid.run.report import attached, report_run
from dphybrid.run.trainer import train_here
from dphybrid.training.callbacks import Callback
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
            with closing_run(run, settings):
                train_run(run, experiment, stop, callbacks)
        # Outside of the inner handler of signals: an evaluation has no step to finish, and ends at once.
        with closing_run(run, settings):
            evaluate_run(run, experiment)
            return report_run(run, experiment)


@contextmanager
def closing_run(run: Run, settings: Settings) -> Iterator[None]:
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
            attached(run, settings).finish("FAILED" if isinstance(error, Exception) else "KILLED")
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
