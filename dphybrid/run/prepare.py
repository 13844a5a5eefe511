"""Prepares the data of an experiment. Imports no torch, which takes longer than to prepare a small table."""

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data.store import Prepared
from dphybrid.recipes.recipe import Recipe
from dphybrid.training.display import preparation_progress
from dphybrid.util.files import make_folder, naming
from dphybrid.util.text import printable


def prepare(
    recipe: Recipe, config: ExperimentConfig, settings: Settings, most_lines: int = 10
) -> tuple[Prepared, ExperimentConfig]:
    """Prepare the data, or reuse prepared data; print what it holds, in at most so many lines. Return it, and
    the config with the values that depend on it. Raises UserError for data that cannot be used."""
    with naming(settings.data_dir):
        make_folder(settings.data_dir)
    data = recipe.prepare(config.data, settings.prepared_dir, config.train.seed, preparation_progress())
    print(f"{'Reusing prepared data' if data.reused else 'Prepared data'}: {data.path}", flush=True)
    print(printable("\n".join(_summary(data, most_lines))), flush=True)
    config, sizes = recipe.sized(config, len(data.dataset("train")), data.info)
    if sizes:
        print("\n  ".join(["Chosen for this data (a flag overrides each):", *sizes]), flush=True)
    return data, config


def _summary(data: Prepared, most_lines: int) -> list[str]:
    """Return the description of the data, without its details if it has too many lines: those begin with
    four blanks, such as a line for each column."""
    lines = data.describe().splitlines()
    if len(lines) <= most_lines:
        return lines
    few = [line for line in lines if not line.startswith("    ")]
    few[most_lines - 2 : -1] = []
    return [*few, f"  {len(lines) - len(few)} more lines about the data: {data.path / 'manifest.json'}"]
