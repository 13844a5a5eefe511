"""Read the data, show its columns and splits, and stop.

examples:
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked --schema schema.toml
  %(prog)s --data.path my_texts/

The prepared data is kept: training with the same values reuses it.
"""

import argparse
import shutil
from pathlib import Path

from dphybrid.cli.flags import add_config_flags, data_config
from dphybrid.cli.parser import Parser
from dphybrid.config import flatten
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import given_values
from dphybrid.recipes.registry import OF_TABLES, find_recipe
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target
from dphybrid.util.text import as_flags


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    schema = "also write the columns' roles to FILE (recipe ctr)"
    parser.add_argument("--schema", type=Path, metavar="FILE", help=schema)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Read the data, show its columns and splits, and stop."""
    schema: Path | None = args.schema
    if schema is not None:
        check_target(schema, f"--schema {schema}")
    config = data_config(args)
    if schema is not None and not find_recipe(config.recipe).tabular:
        raise UserError(
            f"--schema {schema}: recipe {config.recipe} has no columns; leave it out, or use {OF_TABLES}"
        )
    from dphybrid.run.build import prepare_data

    folder = prepare_data(config, load_settings()).data.path
    print(f"Train on it: dphybrid train {as_flags(flatten(given_values(config)))}")
    if schema is not None:
        shutil.copyfile(folder / "schema.toml", schema)
        print(f"Roles: {schema}; edit it and give it back with --data.schema-file {schema}")
    return 0
