"""The first part of a run: prepare the data, build the model once, create the run's folder and its record."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dphybrid.config import ExperimentConfig, flatten
from dphybrid.config.own_runs import enter, own_folders
from dphybrid.config.settings import Settings
from dphybrid.data.table.labels import Label
from dphybrid.embedding import dense_parameters, find_tables
from dphybrid.gpus.devices import expected_devices
from dphybrid.parallel import Devices, find_data_parallel, resolve_devices, split_sizes
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
from dphybrid.run.prepare import prepare
from dphybrid.run.trainer import build_trained, set_up_process
from dphybrid.tracking import Tracker, waiting
from dphybrid.tracking.record import RECORD
from dphybrid.tracking.tracker import FILES, FOLDER_TAG
from dphybrid.training.callbacks import Callback, find_callbacks
from dphybrid.training.checkpoint import complete_checkpoints
from dphybrid.training.label_tasks import LabelTask
from dphybrid.util.alive import holding
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import disk_errors_told
from dphybrid.util.stop import Interrupted
from dphybrid.util.text import flag_text


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
    _note_idle_devices(config, expected_devices(config, settings))
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


def _note_idle_devices(config: ExperimentConfig, devices: str) -> None:
    """Print a note if a batch has too few rows to use every device."""
    resolved = resolve_devices(devices)
    used = len(split_sizes(config.train.batch_size, len(resolved)))
    if used < len(resolved):
        print(
            f"Note: train.batch_size={config.train.batch_size} leaves {len(resolved) - used} of "
            f"{len(resolved)} devices idle; use {len(resolved)} or more",
            flush=True,
        )


@contextmanager
def build_run(
    experiment: Experiment,
    *,
    run_name: str | None = None,
    tags: dict[str, str] | None = None,
    links: dict[str, str] | None = None,
) -> Iterator[Experiment]:
    """Build the model once; create the run folder and its MLflow run, or reopen those of the run to resume.
    Yield the experiment with its run, whose lock is held from its folder on to the end of the block.

    If the block is interrupted, the MLflow run ends as KILLED, and the Interrupted gets the run's name; if it
    fails, as FAILED. tags: more tags for the MLflow run. links: name -> address, shown on the run's page (the
    flow run, say). Raises UserError when another process runs the run, or when the disk is full.
    """
    with ExitStack() as held:
        with disk_errors_told():
            run = _begun(experiment, held, run_name, tags, links)
        try:
            with disk_errors_told("then continue with --resume"):
                yield replace(experiment, found=run)
        except BaseException as error:
            if isinstance(error, Interrupted):
                error.run = run.folder.name  # the command says how to continue it
            # Interrupted is a KeyboardInterrupt, not an Exception: the run was asked to end and did not fail.
            attached(run).finish("FAILED" if isinstance(error, Exception) else "KILLED")
            raise


def _begun(
    experiment: Experiment,
    held: ExitStack,
    run_name: str | None,
    tags: dict[str, str] | None,
    links: dict[str, str] | None,
) -> Run:
    """Begin a run, or continue it; `held` gets its lock."""
    settings, config, data = experiment.settings, experiment.config, experiment.data
    devices, given = resolve_devices(experiment.devices), experiment.engine.tags(tags or {})
    previous = experiment.found
    filled = bool(config.train.warm_start or (previous and complete_checkpoints(previous.checkpoints)))
    facts = _facts_of_model(experiment, devices, filled)
    # A new run gets its id from the server, so that must answer. A resumed run has an id and a record, which
    # is sent once the server is back.
    recorded = previous is not None and (previous.folder / RECORD).is_file()
    tracker = attached(previous) if previous and recorded else open_run_tracker(settings, config.recipe)
    if count := waiting(own_folders(settings)):
        print(
            f"Records of {counted(count, 'earlier run')} are not in MLflow yet; `dphybrid sync` sends them",
            flush=True,
        )
    # Only after the server has answered, so that a run that cannot be recorded leaves no folder behind.
    now = datetime.now(UTC)
    if previous:
        folder, before = previous.folder, previous.page
        before = before.model_copy(update={"run_id": before.run_id or (tracker.run_id if recorded else "")})
        held.enter_context(holding(folder))
    else:
        # `cpu*8` becomes `cpux8`: a shell would expand a `*` in a folder's name.
        where = devices.text.translate(str.maketrans("*,", "x+", ":"))
        name = f"{experiment.recipe.name}-{where}-{now.astimezone():%m%d-%H%M%S}"
        folder = new_run_folder(settings, run_name or name)
        held.enter_context(holding(folder))
        before = RunPage(
            run_id="",
            attempt=0,
            config={},
            prepared="",
            data_digest="",
            created=now.isoformat(),
            uid=enter(folder),
        )
    page = before.model_copy(
        update={
            "attempt": before.attempt + 1,
            "config": config.model_dump(mode="json"),
            "devices": devices.text,
            "prepared": str(data.path),
            "data_digest": data.digest,
            "links": {**before.links, **(links or {})},
            "tags": {**before.tags, **given},
        }
    )
    try:
        page.write(folder / "run.json")  # with its uid, by which `dphybrid sync` knows the record
        run_id = _recorded(Run(folder, page, settings), experiment, tracker, given, facts)
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


def _facts_of_model(experiment: Experiment, devices: Devices, filled: bool) -> dict[str, Any]:
    """Build the model, check it and print its sizes; return them with the label's kind of task. filled:
    whether a checkpoint will give the rows of its tables. Raises UserError for a model, or a label, that
    cannot be trained."""
    engine, built = experiment.engine, experiment.built
    engine.check_data(experiment.data, experiment.recipe.tabular)
    label = _label_of(experiment)
    if engine.trains_here:
        devices = set_up_process(experiment)
        built.trained, built.filled = build_trained(experiment, devices, filled), filled
        model = built.trained.model
    else:  # the ranks build it; here it is only checked, and its rows need no initial values
        with engine.new_tables(filled=True):
            model = experiment.build(devices)
    engine.check_model(model)
    tables = [table.settled() for table in find_tables(model).values()]
    num_rows, num_bytes = sum(map(len, tables)), sum(rows_VD.nbytes for rows_VD in tables)
    parameters = sum(p.numel() for p in dense_parameters(model))
    blocks = ", ".join(name or "model" for name in find_data_parallel(model)) or "none"
    table = "no table"
    if num_rows:
        size = f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} KiB"
        table = f"{num_rows:,} table rows ({size}) in host memory"
    print(
        f"Model: {parameters:,} parameters in dense blocks, {table}; data-parallel: {blocks}; devices: "
        f"{devices.text}",
        flush=True,
    )
    sizes = {"block_parameters": parameters, "table_rows": num_rows, "table_bytes": num_bytes}
    return {**({"label.task": label} if label else {}), **{f"size.{k}": v for k, v in sizes.items()}}


def _recorded(
    run: Run, experiment: Experiment, tracker: Tracker, tags: Mapping[str, str], facts: Mapping[str, object]
) -> str:
    """Start the run's record, or continue it; return its id. facts: params about the model."""
    config, data, page = experiment.config, experiment.data, run.page
    shown = experiment.engine.shown_devices(page.devices)
    all_tags = {
        **_environment_tags(),
        **tags,
        "dphybrid.recipe": config.recipe,
        "dphybrid.devices": shown,
        "dphybrid.replicas": str(experiment.engine.num_parts(page.devices)),
        "dphybrid.attempt": str(page.attempt),
        FOLDER_TAG: str(run.folder.absolute()),
        "dphybrid.source_digest": data.manifest.source_digest,
    }
    values = {**flatten(page.config), "devices": shown, **facts}
    # Metrics of runs can be compared only if they were measured on the same rows.
    values |= {"valid.rows": len(data.dataset("valid")), "valid.digest": data.held_out[:12]}
    values |= {f"split.{name}": value for name, value in data.manifest.split.items()}
    # MLflow stores params as text; a list is written as its command-line flag takes it: `a,b`.
    params = {n: flag_text(v) if isinstance(v, list) else str(v) for n, v in values.items()}
    what = f"`{config.recipe}` on prepared data `{data.path.name}`"
    note = f"{what}; the report replaces this text when the run ends."
    begin: Callable[..., str] = tracker.start
    if page.run_id and experiment.found is not None:
        # On other devices the same values go on.
        changed = changed_values(experiment.found.page.config | {"devices": config.devices}, config)
        begin = partial(tracker.resume, changed=bool(changed))
    run_id = begin(run.folder.name, params, all_tags, note) or page.run_id
    tracker.log_dataset(
        name=data.path.name,
        digest=data.digest,
        source=experiment.source,
        num_rows=len(data.dataset("train")),
        columns=list(data.info),
        context="training",
    )
    return run_id


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


def _environment_tags() -> dict[str, str]:
    """Return tags for what a result may depend on: versions, machine, commit."""
    tags = {f"version.{name}": version(name) for name in ("dphybrid", "mlflow", "polars") if find_spec(name)}
    # With the build, such as +cu130, which the name of the package from PyPI lacks.
    tags |= {"version.torch": str(torch.__version__), "torch.threads": str(torch.get_num_threads())}
    tags |= {"version.python": platform.python_version()}
    tags |= {"host.name": platform.node(), "host.cpus": str(os.cpu_count())}
    if torch.cuda.is_available():
        tags["host.gpus"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    # The commit of dphybrid's own sources, not of the folder where the run was started. An installed package
    # may lie in somebody else's repository, as that of its virtual environment.
    sources = Path(__file__).parents[2]
    if not (sources / ".git").exists():
        return tags
    command = ["git", "-C", str(sources), "status", "--porcelain=v2", "--branch"]
    try:
        told = subprocess.check_output(command, stderr=subprocess.PIPE, encoding="utf-8", timeout=10)
    except (OSError, subprocess.SubprocessError):
        return tags
    lines = told.splitlines()
    commit = next(line.split()[-1] for line in lines if line.startswith("# branch.oid"))
    dirty = str(any(not line.startswith("#") for line in lines)).lower()
    return tags | {"mlflow.source.git.commit": commit, "dphybrid.dirty": dirty}
