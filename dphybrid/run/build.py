"""What happens before a run trains: its data is prepared, its model is built once, its folder and its record
are made."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dphybrid.cluster.refusals import refuse_label_for_ranks, refuse_model_for_ranks, refuse_ranks
from dphybrid.config import ExperimentConfig, flatten
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared
from dphybrid.data.table.labels import Label
from dphybrid.embedding import dense_parameters, find_tables
from dphybrid.embedding.kernels import use_threads
from dphybrid.embedding.machine_code import compiled_folder
from dphybrid.embedding.storage import deferred_rows, unfilled_rows
from dphybrid.gpus.leasing import expected_devices
from dphybrid.parallel import (
    Devices,
    find_data_parallel,
    resolve_devices,
    split_sizes,
)
from dphybrid.recipes.context import build_from_config
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.folder import (
    data_source,
    environment_tags,
    find_run,
    new_run_folder,
    shown_devices,
)
from dphybrid.run.pages import RunPage
from dphybrid.run.report import open_run_tracker
from dphybrid.tracking import waiting
from dphybrid.training.callbacks import find_callbacks
from dphybrid.training.display import preparation_progress
from dphybrid.training.label_tasks import LabelTask
from dphybrid.training.warm_up import compiling_kernels
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.files import disk_errors_told, make_folder, naming
from dphybrid.util.text import printable


def prepare_data(config: ExperimentConfig, settings: Settings, local_ranks: int | None = None) -> str:
    """Make the prepared data, or find it made; return its folder. Raises UserError for unusable input.

    local_ranks: of `cluster.ranks`, those of this machine; None: all.
    """
    devices = expected_devices(config, settings)
    refuse_ranks(config, settings, devices, local_ranks)
    check_devices(config, devices)
    find_callbacks(config.train.callbacks)
    with naming(settings.data_dir):
        # data, runs and records are their owner's, unless the folder was made otherwise
        make_folder(settings.data_dir, mode=0o700)
    if settings.threads:
        use_threads(settings.threads)
    with compiling_kernels(config, compiled_folder(settings.data_dir)), preparation_progress() as progress:
        prepared = find_recipe(config.recipe).prepare(
            config.data, settings.prepared_dir, config.train.seed, progress
        )
    print(f"{'Reusing prepared data' if prepared.reused else 'Prepared data'}: {prepared.path}", flush=True)
    print(printable(prepared.describe()), flush=True)
    return str(prepared.path)


def check_devices(config: ExperimentConfig, devices: str) -> Devices:
    """Resolve the devices and note it when batches are too small to give each one a row. Raises UserError for
    devices that are not there."""
    resolved = resolve_devices(devices)
    used = len(split_sizes(config.train.batch_size, len(resolved)))
    if used < len(resolved):
        print(
            f"Note: train.batch_size={config.train.batch_size} leaves {len(resolved) - used} of "
            f"{len(resolved)} devices idle; `dphybrid plan --devices '{resolved.text}' --batch-size "
            f"{config.train.batch_size}` shows the split",
            flush=True,
        )
    return resolved


def resumed_replicas(config: ExperimentConfig, settings: Settings, prepared: str, resume: str | None) -> int:
    """Return on how many devices the run to resume computed, 0 for a new one. Raises UserError when there is
    none to resume."""
    if not resume:
        return 0
    previous = find_run(settings, config, find_recipe(config.recipe).open(Path(prepared)), resume)
    return len(parse_device_spec(previous.page.devices).names)


@disk_errors_told()
def build_run(
    config: ExperimentConfig,
    settings: Settings,
    prepared: str,
    devices_text: str,
    *,
    run_name: str | None = None,
    resume: str | None = None,
    tags: dict[str, str] | None = None,
    links: dict[str, str] | None = None,
) -> str:
    """Build the model once on the given devices, create (or reopen) the run folder and its MLflow run; return
    the folder.

    tags: more tags for the MLflow run. links: name -> address, shown on the run's page (the flow run, say).
    resume: "latest" for the newest run of this recipe, model and data, or a run's name. Raises UserError when
    there is none.
    """
    if config.cluster.ranks:  # a resumed run may have had more machines
        tags = {"dphybrid.nodes": "1", **(tags or {})}
    recipe = find_recipe(config.recipe)
    data = recipe.open(Path(prepared))
    refuse_label_for_ranks(config, data)
    label = _label_of(recipe, data)
    devices = resolve_devices(devices_text)
    with deferred_rows() if config.cluster.ranks else unfilled_rows():  # it is only looked at
        model = build_from_config(config, data.info, devices, settings.table_folder)
    refuse_model_for_ranks(config, model)
    sizes = {
        "size.block_parameters": sum(p.numel() for p in dense_parameters(model)),
        "size.table_rows": sum(len(t.rows_VD) for t in find_tables(model).values()),
        "size.table_bytes": sum(
            t.rows_VD.numel() * t.rows_VD.element_size() for t in find_tables(model).values()
        ),
    }
    blocks = ", ".join(name or "model" for name in find_data_parallel(model)) or "none"
    print(
        f"Model: {sizes['size.block_parameters']:,} parameters in blocks, {sizes['size.table_rows']:,} table "
        f"rows ({sizes['size.table_bytes'] / 2**20:.1f} MiB) in host memory; data-parallel: {blocks}; "
        f"devices: {devices.text}",
        flush=True,
    )
    previous = find_run(settings, config, data, resume) if resume else None
    folder = previous.folder if previous else new_run_folder(settings, config, devices, run_name)
    tracker = open_run_tracker(settings, must_answer=previous is None)
    if count := waiting(settings.mlflow_dir / "spool"):
        print(
            f"Note: records of {count} earlier {'run' if count == 1 else 'runs'} wait to be sent; `dphybrid "
            "sync` does it",
            flush=True,
        )
    attempt = previous.page.attempt + 1 if previous else 1
    shown = shown_devices(config, devices.text, tags or {})
    all_tags = {
        **environment_tags(),
        **(tags or {}),
        "dphybrid.recipe": config.recipe,
        "dphybrid.devices": shown,
        "dphybrid.attempt": str(attempt),
        "dphybrid.run_folder": str(folder),
        "dphybrid.source_digest": data.manifest.source_digest,
    }
    if config.cluster.ranks:
        all_tags["dphybrid.ranks"] = str(config.cluster.ranks)
    values: dict[str, Any] = {
        **flatten(config.model_dump(mode="json")),
        "devices.replicas": config.cluster.ranks or len(devices),
        "devices.resolved": shown,
        **({"label.task": label} if label else {}),
        **{f"split.{name}": value for name, value in data.manifest.split.items()},
        **sizes,
    }
    params = {
        name: ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in values.items()
    }
    try:
        if previous:
            run_id = previous.page.run_id
            tracker.resume(run_id, all_tags)
        else:
            run_id = tracker.start(folder.name, params, all_tags, _note(config, data))
        tracker.log_dataset(
            name=data.path.name,
            digest=data.digest,
            source=data_source(config),
            num_rows=len(data.dataset("train")),
            columns=list(data.info),
            context="training",
        )
    except BaseException:
        if previous is None:
            folder.rmdir()
        raise
    finally:
        tracker.close()
    page = RunPage(
        run_id=run_id,
        attempt=attempt,
        config=config.model_dump(mode="json"),
        devices=devices.text,
        prepared=prepared,
        data_digest=data.digest,
        links={**(previous.page.links if previous else {}), **(links or {})},
        tags={**(previous.page.tags if previous else {}), **(tags or {})},
        created=previous.page.created if previous else datetime.now(UTC).isoformat(),
    )
    page.write(folder / "run.json")
    print(f"Run: {folder.name}" + (f" ({run_id})" if run_id else ", not recorded"), flush=True)
    return str(folder)


def _label_of(recipe: Recipe, data: Prepared) -> str | None:
    """Return what the label of a table is learnt as. Raises UserError when the recipe learns no such one."""
    if not recipe.tabular:
        return None
    label = Label.of(data.info).task
    if label != "binary" and not isinstance(recipe.task(data.info), LabelTask):
        raise UserError(
            f"recipe {recipe.name}: learns binary labels, and this one is {label}; give data.task=binary "
            "with a label of two values, or have the recipe's task(info) return "
            "dphybrid.training.label_tasks.label_task(info) and its model take the loss from there"
        )
    return label


def _note(config: ExperimentConfig, data: Prepared) -> str:
    return (
        f"`{config.recipe}` on prepared data `{data.path.name}`; the report stands here when the run has "
        "ended."
    )
