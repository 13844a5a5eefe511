"""Prepares the data of an experiment. Imports no torch, which takes longer than to prepare a small table."""

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data.store import Prepared
from dphybrid.recipes.recipe import Recipe
from dphybrid.training.display import preparation_progress
from dphybrid.util.files import make_folder, naming
from dphybrid.util.text import printable

_MOST_LINES = 10
"""The longest description of data that is printed with its details."""


def prepare(
    recipe: Recipe, config: ExperimentConfig, settings: Settings, details: bool = False
) -> tuple[Prepared, ExperimentConfig]:
    """Prepare the data, or reuse prepared data; print what it holds. Return it, and the config with the
    values that depend on it. details: also print the details of long descriptions, such as a line for each
    column. Raises UserError for data that cannot be used."""
    with naming(settings.data_dir):
        make_folder(settings.data_dir)
    data = recipe.prepare(config.data, settings.prepared_dir, config.train.seed, preparation_progress())
    print(f"{'Reusing prepared data' if data.reused else 'Prepared data'}: {data.path}", flush=True)
    lines = data.describe().splitlines()
    if len(lines) > _MOST_LINES and not details:
        few = [line for line in lines if not line.startswith("    ")]
        lines = [*few, f"  {len(lines) - len(few)} more lines about the data: {data.path / 'manifest.json'}"]
    print(printable("\n".join(lines)), flush=True)
    config, sizes = recipe.sized(config, len(data.dataset("train")), data.info)
    if sizes:
        print("\n  ".join(["Chosen for this data (a flag overrides each):", *sizes]), flush=True)
    return data, config
