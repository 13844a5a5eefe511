"""Prepares the data of an experiment. Imports no torch, which takes longer than to prepare a small table."""

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data.store import Prepared
from dphybrid.recipes.recipe import Recipe
from dphybrid.training.display import preparation_progress
from dphybrid.util.files import make_folder, naming
from dphybrid.util.text import printable


def prepare(
    recipe: Recipe, config: ExperimentConfig, settings: Settings
) -> tuple[Prepared, ExperimentConfig]:
    """Prepare the data, or reuse prepared data; print what it holds. Return it, and the config with the
    values that depend on it. Raises UserError for data that cannot be used."""
    with naming(settings.data_dir):
        make_folder(settings.data_dir)
    with preparation_progress() as progress:
        data = recipe.prepare(config.data, settings.prepared_dir, config.train.seed, progress)
    print(f"{'Reusing prepared data' if data.reused else 'Prepared data'}: {data.path}", flush=True)
    print(printable(data.describe()), flush=True)
    config, sizes = recipe.sized(config, len(data.dataset("train")), data.info)
    if sizes:
        print("\n  ".join(["Chosen for this data (a flag overrides each):", *sizes]), flush=True)
    return data, config
