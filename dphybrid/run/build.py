"""The first part of a run: prepare its data, build its model once, make its folder and its record."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dphybrid.config import ExperimentConfig, flatten
from dphybrid.config.settings import Settings
from dphybrid.data.table.labels import Label
from dphybrid.embedding import dense_parameters, find_tables
from dphybrid.parallel import Devices, find_data_parallel, resolve_devices, split_sizes
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.experiment import Experiment, choose_engine
from dphybrid.run.folder import Run, RunPage, changed_values, check_run_name, find_run, new_run_folder
from dphybrid.run.leasing import expected_devices
from dphybrid.run.report import open_run_tracker
from dphybrid.tracking import CHANGED_TAG, Tracker, waiting
from dphybrid.tracking.files import FILES
from dphybrid.training.callbacks import Callback, find_callbacks
from dphybrid.training.display import preparation_progress
from dphybrid.training.label_tasks import LabelTask
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import disk_errors_told, make_folder, naming
from dphybrid.util.text import printable


def prepare_data(
    config: ExperimentConfig,
    settings: Settings,
    callbacks: Sequence[Callback] = (),
    here: int = 0,
    run_name: str | None = None,
) -> Experiment:
    """Make the prepared data, or find it made; return the experiment on it. Raises UserError for what cannot
    be trained, before work starts.

    callbacks: beside those of the config. here: of a cluster's processes, those of this machine; 0: all.
    run_name: of the run that is to come.
    """
    check_run_name(run_name)
    recipe, engine = find_recipe(config.recipe), choose_engine(config)
    devices, own = expected_devices(config, settings), type(recipe)
    own_step = own.step is not Recipe.step or own.optimizers is not Recipe.optimizers
    engine.check(recipe.one_process or own_step, settings, devices, callbacks, here)
    # Errors that need no data come before the data is read.
    resolve_devices(devices)
    find_callbacks(config.train.callbacks)
    with naming(settings.data_dir):
        # data, runs and records are their owner's, unless the folder was made otherwise
        make_folder(settings.data_dir, mode=0o700)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with preparation_progress() as progress:
        data = recipe.prepare(config.data, settings.prepared_dir, config.train.seed, progress)
    print(f"{'Reusing prepared data' if data.reused else 'Prepared data'}: {data.path}", flush=True)
    print(printable(data.describe()), flush=True)
    for doubt in recipe.doubts(data):
        print(f"Note: {doubt}", flush=True)
    experiment, sizes = Experiment.sized(recipe, config, settings, data)
    if sizes:
        print("Chosen for this data (a flag overrides each):", *sizes, sep="\n  ", flush=True)
    _note_idle_devices(experiment.config, devices)
    return experiment


def _note_idle_devices(config: ExperimentConfig, devices: str) -> None:
    """Note it when batches are too small to give each device a row."""
    resolved = resolve_devices(devices)
    used = len(split_sizes(config.train.batch_size, len(resolved)))
    if used < len(resolved):
        print(
            f"Note: train.batch_size={config.train.batch_size} leaves {len(resolved) - used} of "
            f"{len(resolved)} devices idle; `dphybrid plan --devices '{resolved.text}' --batch-size "
            f"{config.train.batch_size}` shows the split",
            flush=True,
        )


def resumed_replicas(experiment: Experiment, resume: str | None) -> int:
    """Return on how many devices the run to resume computed, 0 for a new one. Raises UserError when there is
    none to resume."""
    return len(parse_device_spec(find_run(experiment, resume).page.devices).names) if resume else 0


@disk_errors_told()
def build_run(
    experiment: Experiment,
    devices_text: str,
    *,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
    links: dict[str, str] | None = None,
) -> Run:
    """Build the model once on the given devices, create (or reopen) the run folder and its MLflow run.

    tags: more tags for the MLflow run. links: name -> address, shown on the run's page (the flow run, say).
    resume: "latest" for the newest run of this recipe, model and data, or a run's name. Raises UserError when
    there is none.
    """
    settings, config, data = experiment.settings, experiment.config, experiment.data
    devices, given = resolve_devices(devices_text), experiment.engine.tags(tags or {})
    facts = _facts_of_model(experiment, devices)
    previous = find_run(experiment, resume) if resume else None
    if previous:  # devices as they were found: `auto` is no change
        was = previous.config.model_dump(mode="json") | {"devices": previous.page.devices}
        changed = changed_values(was, config.model_copy(update={"devices": devices.text}))
        given |= {f"{CHANGED_TAG}{name}": both for name, both in changed.items()}
    # A new run gets its id from the server; one that goes on has an outbox, which sends when that is back.
    tracker = open_run_tracker(settings, must_answer=not (previous and previous.page.run_id))
    if count := waiting(settings.mlflow_dir / "spool"):
        print(f"Records of {counted(count, 'earlier run')} wait; `dphybrid sync` sends them", flush=True)
    # after the server has answered: a run that cannot be recorded leaves no folder behind
    folder = previous.folder if previous else new_run_folder(experiment, devices, run_name)
    now = datetime.now(UTC).isoformat()
    new = RunPage(run_id="", attempt=0, config={}, prepared="", data_digest="", created=now)
    before = previous.page if previous else new
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
        run_id = _recorded(Run(folder, page, settings), experiment, tracker, given, facts)
    except BaseException:
        if previous is None:
            # A run without a record leaves nothing behind; its folder is still empty.
            folder.rmdir()
        raise
    finally:
        # The run stays open: the training attaches to it, perhaps in another process.
        tracker.close()
    run = Run(folder, page.model_copy(update={"run_id": run_id}), settings)
    run.page.write(folder / "run.json")
    if tracker.tracking_uri == FILES:
        print(f"Recorded in plain files: {folder / 'record'}; pip install 'dphybrid[mlflow]' adds MLflow")
    print(f"Run: {folder.name}" + (f" ({run_id})" if run_id else ", not recorded"), flush=True)
    return run


def _facts_of_model(experiment: Experiment, devices: Devices) -> dict[str, Any]:
    """Build the model, to be looked at; tell its sizes, and return them and what the label is learnt as.
    Raises UserError for a model, or a label, that cannot be trained."""
    engine = experiment.engine
    engine.check_data(experiment.data, experiment.recipe.tabular)
    label = _label_of(experiment)
    # Built to be looked at: its rows need no start values.
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
    """Begin the run's record, or go on with it; return its id. facts: about the model."""
    config, data, page = experiment.config, experiment.data, run.page
    shown = experiment.engine.shown_devices(page.devices, tags)
    all_tags = {
        **_environment_tags(),
        **tags,
        "dphybrid.recipe": config.recipe,
        "dphybrid.devices": shown,
        "dphybrid.replicas": str(experiment.engine.num_parts(page.devices)),
        "dphybrid.attempt": str(page.attempt),
        "dphybrid.run_folder": str(run.folder),
        "dphybrid.source_digest": data.manifest.source_digest,
    }
    if run_id := page.run_id:
        tracker.resume(run_id, all_tags)
    else:
        values = {**flatten(page.config), "devices": shown, **facts}
        values |= {f"split.{name}": value for name, value in data.manifest.split.items()}
        # MLflow keeps params as texts; a list stands there as its flag takes it.
        texts = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
        params = {name: ",".join(map(str, value)) for name, value in texts.items()}
        what = f"`{config.recipe}` on prepared data `{data.path.name}`"
        note = f"{what}; the report stands here when the run has ended."
        run_id = tracker.start(run.folder.name, params, all_tags, note)
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
    """Return what the label of a table is learnt as. Raises UserError when the recipe learns no such one."""
    recipe = experiment.recipe
    if not recipe.tabular:
        return None
    label = Label.of(experiment.data.info).task
    if label != "binary" and not isinstance(experiment.task, LabelTask):
        raise UserError(
            f"recipe {recipe.name}: learns binary labels, and this one is {label}; give data.task=binary "
            "with a label of two values, or have the recipe's task(info) return "
            "dphybrid.training.label_tasks.label_task(info) and its model take the loss from there"
        )
    return label


def _environment_tags() -> dict[str, str]:
    """Return what a result may depend on: versions, machine, commit."""
    packages = ("dphybrid", "torch", "mlflow", "polars")
    tags = {f"version.{name}": version(name) for name in packages if find_spec(name)}
    tags |= {"version.python": platform.python_version(), "torch.threads": str(torch.get_num_threads())}
    tags |= {"host.name": platform.node(), "host.cpus": str(os.cpu_count())}
    if torch.cuda.is_available():
        tags["host.gpus"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    try:
        commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return tags  # installed without its repository
    return tags | {"mlflow.source.git.commit": commit, "dphybrid.dirty": str(bool(changes)).lower()}


def _git(*words: str) -> str:
    # The commit of dphybrid's own sources, wherever the run was started.
    command = ["git", "-C", str(Path(__file__).parent), *words]  # the user's own git
    return subprocess.check_output(command, stderr=subprocess.PIPE, encoding="utf-8", timeout=10).strip()
