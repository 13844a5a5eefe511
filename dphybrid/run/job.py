"""The main job, downwards: prepare the data, build the run, train, evaluate and report; `run_job` does all.

The command line, Python and the flow share it; a flow passes what it wraps around each step. A run is a
folder: `run.json` (its description), `checkpoints/`, `result.json`, `splits.txt`, `metrics.json`,
`report.json`; its MLflow run shows the same, for comparing runs.
"""

import gc
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from dphybrid.config import ExperimentConfig, flatten
from dphybrid.config.own_runs import enter
from dphybrid.config.settings import Settings
from dphybrid.data.table.labels import Label
from dphybrid.embedding import dense_parameters, find_tables
from dphybrid.embedding.weights import all_rows
from dphybrid.gpus.devices import expected_devices, giving_way, leased_devices
from dphybrid.parallel import Devices, find_data_parallel, resolve_devices
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.experiment import Experiment, choose_engine
from dphybrid.run.folder import (
    Run,
    RunPage,
    attached,
    changed_values,
    check_run_name,
    new_run_folder,
    open_run_tracker,
)
from dphybrid.run.pages import MetricsPage, Report, ResultPage
from dphybrid.run.prepare import prepare
from dphybrid.run.report import report_run
from dphybrid.run.trainer import build_trained, train_here
from dphybrid.tracking import Tracker
from dphybrid.tracking.record import RECORD
from dphybrid.tracking.tracker import FILES, FOLDER_TAG
from dphybrid.training.callbacks import Callback, find_callbacks
from dphybrid.training.checkpoint import load_weights, verify_checkpoint
from dphybrid.training.label_tasks import LabelTask
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import floor_metrics
from dphybrid.util.alive import holding
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.files import disk_errors_told
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals
from dphybrid.util.text import flag_text

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

    def waiting(self) -> AbstractContextManager[Callable[[str], None] | None]:
        """Return a block with the function that is called with the reason while the job waits for GPUs; None
        prints it."""
        return nullcontext()

    def built(self, run: Run) -> None:
        """The run has its folder and its record."""


def run_job(
    config: ExperimentConfig,
    settings: Settings,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
    stop: StopRequest | None = None,
    callbacks: Sequence[Callback] = (),
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
        name = run_name or around.name or resume or experiment.recipe.name
        replicas = len(parse_device_spec(experiment.found.page.devices).names) if experiment.found else 0
        with around.waiting() as on_wait:
            lease = leased_devices(config, settings, run=name, replicas=replicas, on_wait=on_wait, stop=stop)
            # Keep the lease until the report is written: the evaluation uses the GPUs, too.
            devices = held.enter_context(lease)

        def build() -> Experiment:
            ready, every = replace(experiment, devices=devices.text), devices.tags | (tags or {})
            built = held.enter_context(build_run(ready, run_name=run_name, tags=every))
            around.built(built.run)
            return built

        with giving_way(devices, settings, stop), stop_signals(stop):
            built = around.step("build", build)
            around.step("train", lambda: train_run(built, stop, callbacks))
        # Outside the inner signal handler: an evaluation has no step to finish, so a signal ends it at once.
        around.step("evaluate", lambda: evaluate_run(built))
        stop.obey("after its evaluation")
        return around.step("report", lambda: report_run(built))


def prepare_data(
    config: ExperimentConfig,
    settings: Settings,
    callbacks: Sequence[Callback] = (),
    run_name: str | None = None,
) -> Experiment:
    """Prepare the data, or reuse prepared data; return the experiment on it. Raises UserError as `check_job`
    does, and for data that cannot be used."""
    check_job(config, settings, callbacks, run_name)
    recipe = find_recipe(config.recipe)
    data, config = prepare(recipe, config, settings)
    return Experiment(recipe, config, settings, data, choose_engine(config))


def check_job(
    config: ExperimentConfig, settings: Settings, callbacks: Sequence[Callback], run_name: str | None
) -> None:
    """Raise UserError for an experiment that cannot be trained, as far as that can be told without its data,
    whose preparation may take long.

    callbacks: in addition to those of the config. run_name: the name that the run will get.
    """
    check_run_name(run_name)
    recipe, engine = find_recipe(config.recipe), choose_engine(config)
    devices, own = expected_devices(config, settings), type(recipe)
    # A recipe's own step computes in one process: ranks of a cluster take the engine's step.
    own_step = own.step is not Recipe.step or own.optimizers is not Recipe.optimizers
    engine.check(recipe.one_process or own_step, settings, devices, callbacks)
    resolve_devices(devices)
    find_callbacks(config.train.callbacks)
    if settings.threads:
        torch.set_num_threads(settings.threads)


@contextmanager
def build_run(
    experiment: Experiment,
    *,
    run_name: str | None = None,
    tags: dict[str, str] | None = None,
) -> Iterator[Experiment]:
    """Build the model once; create the run folder and its MLflow run, or reopen those of the run to resume.
    Yield the experiment with its run, whose lock is held from its folder on to the end of the block.

    If it is interrupted from then on, the MLflow run ends as KILLED, and the Interrupted gets the run's name;
    if it fails, as FAILED. tags: more tags for the MLflow run. Raises UserError when another process runs the
    run, or when the disk is full.
    """
    run, remedy = experiment.found, "then continue with --resume"
    with ExitStack() as held:
        with disk_errors_told():
            if run:
                held.enter_context(holding(run.folder))
        try:
            with disk_errors_told(remedy if run else ""):
                run = _begun(experiment, held, run_name, tags or {})
            with disk_errors_told(remedy):
                yield replace(experiment, found=run)
        except BaseException as error:
            if run:
                if isinstance(error, Interrupted):
                    error.run = run.folder.name  # the command says how to continue it
                # Interrupted is a KeyboardInterrupt, not an Exception: the run was asked to end.
                attached(run).finish("FAILED" if isinstance(error, Exception) else "KILLED")
            raise


def _begun(experiment: Experiment, held: ExitStack, run_name: str | None, tags: Mapping[str, str]) -> Run:
    """Begin a run, whose lock `held` gets, or continue one."""
    settings, config, data = experiment.settings, experiment.config, experiment.data
    previous = experiment.found
    devices = resolve_devices(experiment.devices)
    facts = _facts_of_model(experiment, devices)
    # A new run gets its id from the server, so that must answer. A resumed run has an id and a record, which
    # is sent once the server is back.
    recorded = previous is not None and (previous.folder / RECORD).is_file()
    tracker = attached(previous) if previous and recorded else open_run_tracker(settings, config.recipe)
    # Only after the server has answered, so that a run that cannot be recorded leaves no folder behind.
    if previous:
        folder, page = previous.folder, previous.page
        # Its process may have ended between the first line of the record and the id's place in the page.
        run_id = page.run_id or (tracker.run_id if recorded else "")
    else:
        now = datetime.now(UTC)
        # `cpu*8` becomes `cpux8`: a shell would expand a `*` in a folder's name.
        where = devices.text.translate(str.maketrans("*,", "x+", ":"))
        name = f"{experiment.recipe.name}-{where}-{now.astimezone():%m%d-%H%M%S}"
        folder = new_run_folder(settings, run_name or name)
        held.enter_context(holding(folder))
        # The uid, by which `dphybrid sync` knows the record as one of this data folder.
        page, run_id = RunPage(created=now.isoformat(), uid=enter(folder)), ""
    page = page.model_copy(
        update={
            "run_id": run_id,
            "attempt": page.attempt + 1,
            "config": config.model_dump(mode="json"),
            "devices": devices.text,
            "prepared": str(data.path),
            "data_digest": data.digest,
            "tags": {**page.tags, **tags},
        }
    )
    try:
        page.write(folder / "run.json")
        run_id = _recorded(Run(folder, page, settings), experiment, tracker, tags, facts)
    except BaseException:
        if previous is None:
            shutil.rmtree(folder)
        raise
    finally:
        # This closes the tracker, not the MLflow run: training attaches to that, perhaps in another process.
        tracker.close()
    run = Run(folder, page.model_copy(update={"run_id": run_id}), settings)
    run.page.write(folder / "run.json")
    if tracker.tracking_uri == FILES:
        print(f"Recorded in {folder / 'record.jsonl'}; pip install 'dphybrid[mlflow]' adds MLflow")
    print(f"Run: {folder.name}" + (f" ({run_id})" if run_id else ", not recorded"), flush=True)
    return run


def _facts_of_model(experiment: Experiment, devices: Devices) -> dict[str, Any]:
    """Build the model, check it and print its sizes; return them with the label's kind of task. Raises
    UserError for a model, or a label, that cannot be trained."""
    engine = experiment.engine
    engine.check_data(experiment.data, experiment.recipe.tabular)
    label = _label_of(experiment)
    if engine.trains_here:
        model = build_trained(experiment).model
    else:  # the ranks build it; here it is only checked, and its rows need no initial values
        with engine.new_tables(filled=True):
            model = experiment.build(devices)
    engine.check_model(model)
    tables = [all_rows(table.weight) for table in find_tables(model).values()]
    num_rows, num_bytes = sum(map(len, tables)), sum(rows_VD.nbytes for rows_VD in tables)
    parameters = sum(p.numel() for p in dense_parameters(model))
    blocks = ", ".join(name or "model" for name in find_data_parallel(model)) or "none"
    size = f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} KiB"
    table = f"{num_rows:,} table rows ({size}) in host memory" if num_rows else "no table"
    print(
        f"Model: {parameters:,} parameters in dense blocks, {table}; data-parallel: {blocks}; devices: "
        f"{devices.text}",
        flush=True,
    )
    sizes = {"size.block_parameters": parameters, "size.table_rows": num_rows, "size.table_bytes": num_bytes}
    return {**({"label.task": label} if label else {}), **sizes}


def _label_of(experiment: Experiment) -> str | None:
    """Return the kind of task that a table's label makes, such as "binary"; None for other data. Raises
    UserError when the recipe cannot learn it."""
    recipe = experiment.recipe
    if not recipe.tabular:
        return None
    label = Label.of(experiment.data.info).task
    if label != "binary" and not isinstance(experiment.task, LabelTask):
        raise UserError(
            f"recipe {recipe.name} learns binary labels only, and this label is {label}; use a label of two "
            "values with data.task=binary, or let the recipe's task(info) return "
            "dphybrid.training.label_tasks.label_task(info) and its model use the loss of that task"
        )
    return label


def _recorded(
    run: Run, experiment: Experiment, tracker: Tracker, tags: Mapping[str, str], facts: Mapping[str, object]
) -> str:
    """Start the run's record, or continue it; return its id. facts: params about the model."""
    config, data, page, engine = experiment.config, experiment.data, run.page, experiment.engine
    shown = engine.shown_devices(page.devices)
    ranks = {"dphybrid.ranks": str(config.cluster.ranks)} if config.cluster.several else {}
    all_tags = {
        **_environment_tags(),
        **tags,
        **ranks,
        "dphybrid.recipe": config.recipe,
        "dphybrid.devices": shown,
        "dphybrid.replicas": str(engine.num_parts(page.devices)),
        "dphybrid.attempt": str(page.attempt),
        FOLDER_TAG: str(run.folder.absolute()),
        "dphybrid.source_digest": data.manifest.source_digest,
        "dphybrid.data_digest": data.digest,
    }
    values = {**flatten(page.config), "devices": shown, **facts}
    # Metrics of runs can be compared only if they were measured on the same rows.
    values |= {"valid.rows": len(data.dataset("valid")), "valid.digest": data.held_out[:12]}
    values |= {f"split.{name}": value for name, value in data.manifest.split.items()}
    # MLflow stores params as text; a list is written as its command-line flag takes it: `a,b`.
    params = {n: flag_text(v) if isinstance(v, list) else str(v) for n, v in values.items()}
    what = f"`{config.recipe}` on prepared data `{data.path.name}`"
    note = f"{what}; the report replaces this text when the run ends."
    if page.run_id and experiment.found is not None:
        # On other devices the same values go on.
        before = experiment.found.page.config | {"devices": config.devices}
        changed = bool(changed_values(before, config))
        return tracker.resume(run.folder.name, params, all_tags, note, changed) or page.run_id
    return tracker.start(run.folder.name, params, all_tags, note)


def _environment_tags() -> dict[str, str]:
    """Return tags for what a result may depend on: versions and machine."""
    tags = {f"version.{name}": version(name) for name in ("dphybrid", "mlflow", "polars") if find_spec(name)}
    # With the build, such as +cu130, which the name of the package from PyPI lacks.
    tags |= {"version.torch": str(torch.__version__), "torch.threads": str(torch.get_num_threads())}
    tags |= {"version.python": platform.python_version()}
    tags |= {"host.name": platform.node(), "host.cpus": str(os.cpu_count())}
    if torch.cuda.is_available():
        tags["host.gpus"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return tags


def train_run(experiment: Experiment, stop: StopRequest, callbacks: Sequence[Callback] = ()) -> ResultPage:
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
    best, built = Path(ResultPage.read(run.folder / "result.json").best_checkpoint), experiment.built
    # The optimizers' states go first, so that the evaluation has their memory.
    gc.collect()
    model, built.model = built.model, None
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

    def outputs_of(part: str) -> dict[str, torch.Tensor]:
        return validation_outputs(model, data.dataset(part), experiment.config.train.batch_size, task)

    outputs, built.outputs = built.outputs, {}
    outputs = drawn = outputs or outputs_of("valid")
    metrics, tested = task.compute(outputs), dict[str, float]()
    if "test" in data.parts:
        drawn = outputs_of("test")
        tested = task.compute(drawn)
    floor, charts = floor_metrics(task, outputs), list(task.charts(drawn)) if task.charts else []
    page = MetricsPage(metrics=metrics, test=tested, floor=floor, charts=charts)
    page.write(run.folder / "metrics.json")
    summary = {f"final_{name}": value for name, value in metrics.items()}
    summary |= {f"test/{name}": value for name, value in tested.items()}
    summary |= {f"baseline_{name}": value for name, value in floor.items()}
    with closing(attached(run)) as tracker:
        tracker.log_summary(summary)
    return metrics
