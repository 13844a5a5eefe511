"""Show how batches will be split over the devices, before anything runs.

examples:
  %(prog)s --devices 'cpu*8' --batch-size 30 --rows 100
  %(prog)s --data.path clicks.csv --data.label clicked      with the rows of the prepared data
"""

import argparse
from typing import TYPE_CHECKING

from dphybrid.cli.flags import add_config_flags, given_config
from dphybrid.cli.parser import Parser
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.recipe import Recipe
from dphybrid.recipes.registry import find_recipe
from dphybrid.util.errors import UserError

if TYPE_CHECKING:
    from dphybrid.data.store import Prepared


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    for name, default, sentence in (
        ("--batch-size", None, "rows of a batch, over all devices (default: the recipe's)"),
        ("--rows", None, "rows of an epoch, to show the last batch too (default: of the prepared data)"),
    ):
        add(name, type=int, default=default, metavar="N", help=sentence)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print how batches will be split, and what each device will hold."""
    from dphybrid.parallel import resolve_devices, split_plan
    from dphybrid.run.leasing import wanted_spec

    config, settings = given_config(args), load_settings()
    rows, recipe = args.rows, find_recipe(config.recipe)
    if rows is None:
        prepared = _prepared(recipe, config, settings)
        rows = len(prepared.dataset("train"))
        print(f"{rows:,} rows to train, in {prepared.path}")
        config, _ = recipe.sized(config, rows, prepared.info)
    elif rows is not None and rows > 0:
        # The base class's rule: a recipe's own may read facts of prepared data, which may not exist yet.
        config, _ = Recipe.sized(recipe, config, rows, {})
    batch_size = config.train.batch_size if args.batch_size is None else args.batch_size
    if batch_size < 1 or rows < 1:
        raise UserError(f"--batch-size {batch_size} --rows {rows}: both must be at least 1")
    devices = resolve_devices(wanted_spec(config, settings).text)
    print(split_plan(rows, batch_size, devices.labels))
    return 0


def _prepared(recipe: Recipe, config: ExperimentConfig, settings: Settings) -> "Prepared":
    """Return the prepared data; generated data is prepared here. Raises UserError when files are not
    prepared."""
    from dphybrid.data.store import find_prepared

    seed = config.train.seed
    source = recipe.source(config.data, seed)
    prepared = find_prepared(recipe.name, source, settings.prepared_dir, seed, recipe.dataset)
    # Generated data takes no time. Files may take hours, and this command should be quick.
    if prepared is None and not config.data.model_dump().get("path"):
        prepared = recipe.prepare(config.data, settings.prepared_dir, seed)
    if prepared is None:
        raise UserError(
            "--rows: the number of rows is unknown until the data is prepared with these values; run "
            "`dphybrid prepare` with them first, or give --rows N"
        )
    return prepared
