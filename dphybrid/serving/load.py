"""Loads models from checkpoints, onto any devices."""

from pathlib import Path

from torch import nn

from dphybrid.config.own_runs import wrote
from dphybrid.config.settings import Settings, load_settings
from dphybrid.data.foreign import misread
from dphybrid.embedding.storage import deferred_rows, unfilled_rows
from dphybrid.parallel import resolve_devices
from dphybrid.recipes.configs import stored_config
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.folder import all_runs, find_run, read_run
from dphybrid.run.pages import ResultPage
from dphybrid.tracking.loader import checkpoint_folder
from dphybrid.tracking.opening import store_to_read
from dphybrid.training.checkpoint import load_weights, verify_checkpoint
from dphybrid.util.digests import inside
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.files import given_path

_MOST_BYTES, _MOST_TIMES = 2**26, 100
"""What a Parquet file may need in memory: so much, or so many times its own size."""
_VIEW_BYTES = 16
"""What polars needs for each text besides its letters, which equal texts share."""


def model_from_checkpoint(
    folder: str | Path, devices: str = "cpu", *, mapped: bool = False, settings: Settings | None = None
) -> nn.Module:
    """Build the model of a checkpoint folder on `devices` and load its weights. It may have been trained on
    other devices. The model is in evaluation mode.

    mapped: its tables stay in the checkpoint's files, and only looked-up rows take memory. settings: None for
    the current ones.
    Raises UserError when the folder is not a checkpoint, when its weights do not fit the model, and when it
    was made elsewhere and names code that is not allowed to run.
    """
    state = verify_checkpoint(Path(folder))
    settings, page = settings or load_settings(), Path(folder) / "state.json"
    config = stored_config(state.config, page, settings)
    if not wrote(page, settings):
        check_memory(Path(folder))
    # Without drawing the tables' initial values, which are overwritten at once.
    resolved = resolve_devices(devices)
    # A page's `info` has what the recipe put there; a page that somebody else wrote may have anything.
    with misread(page), deferred_rows() if mapped else unfilled_rows():
        model = find_recipe(config.recipe).new_model(ModelContext.of(config, state.info, resolved))
    load_weights(Path(folder), model, mapped)
    return model.eval()


def check_memory(folder: Path) -> None:
    """Raise UserError if a Parquet file in the `encoder` folder of a checkpoint needs far more memory than
    room on the disk, as no real one does. By their footers, which a forger may have changed, too."""
    import duckdb

    sizes = "SELECT sum(num_values), sum(total_uncompressed_size) FROM parquet_metadata(?)"
    for file in sorted((folder / "encoder").rglob("*.parquet")):
        try:
            with duckdb.connect(":memory:") as database:
                values, unpacked = database.execute(sizes, [str(file)]).fetchone() or (0, 0)
        except duckdb.Error as error:
            raise UserError(f"{file}: cannot be read ({error}); use another checkpoint") from error
        needed, size = (values or 0) * _VIEW_BYTES + (unpacked or 0), file.stat().st_size
        if needed > max(_MOST_BYTES, size * _MOST_TIMES):
            raise UserError(
                f"{file}: needs {needed >> 20:,} MiB in memory, {needed // size:,} times its size, as no "
                "vocabulary does; use another checkpoint"
            )


def find_checkpoint(which: str, settings: Settings) -> Path:
    """Return the folder of a run's best checkpoint (by the run's name or folder), of a registered model's
    checkpoint (`models:/NAME@ALIAS`), or `which` itself if it is a checkpoint folder.

    Raises UserError if there is no such checkpoint.
    """
    if which.startswith("models:/"):
        return checkpoint_folder(which, store_to_read(settings.mlflow_uri, settings.mlflow_dir))
    folder = given_path(which, "run or checkpoint")
    if (folder / "state.json").is_file():
        return folder
    # A path from the current folder wins over a run of the same name, as in other programs.
    there = (folder / "run.json").is_file()
    run = read_run(folder, settings) if there else find_run(settings, which)
    if run is None:
        names = [run.folder.name for run in all_runs(settings)]
        what = "no run, checkpoint folder or models:/ address of that name"
        raise UserError(f"{which}: {what}{suggestion(which, names)}")
    if not (run.folder / "result.json").is_file():
        raise UserError(
            f"{which}: the training of run {run.folder.name} has not ended; wait for it, continue it with "
            f"--resume {run.folder.name}, or name one of its checkpoint folders"
        )
    best = ResultPage.read(run.folder / "result.json").best_checkpoint
    if not best:
        raise UserError(
            f"{which}: run {run.folder.name} ended before its first checkpoint; continue it with --resume "
            f"{run.folder.name}"
        )
    return inside(run.folder, best)


def load_model(which: str, devices: str = "cpu", *, train: bool = False) -> nn.Module:
    """Return the trained module of any recipe: of a run (its best checkpoint, by the run's name or MLflow's
    id), a checkpoint folder, or a registered model such as `models:/clicks@champion`.

    devices: the devices it computes on, which may differ from those it was trained on. train: return it in
    training mode instead of evaluation mode (no dropout). Raises UserError if there is no such model.
    """
    return model_from_checkpoint(find_checkpoint(which, load_settings()), devices).train(train)
