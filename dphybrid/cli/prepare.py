"""Read the data, show its columns and splits, and stop.

examples:
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked --schema schema.toml
  %(prog)s --data.path my_texts/

The prepared data is kept: training with the same values reuses it.
"""

from pathlib import Path

from pydantic import Field

from dphybrid.cli.flags import ConfigCommand
from dphybrid.config import flatten
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import given_values
from dphybrid.recipes.registry import OF_TABLES, find_recipe
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, write_bytes
from dphybrid.util.text import as_flags


class Flags(ConfigCommand):
    """The flags of `prepare`."""

    schema_file: Path | None = Field(default=None, alias="schema")
    """Also write the columns' roles to FILE (recipe ctr)."""

    def run(self) -> int:
        """Read the data, show its columns and splits, and stop."""
        schema = self.schema_file
        if schema is not None:
            check_target(schema, f"--schema {schema}")
        config = self.data_config()
        if schema is not None and not find_recipe(config.recipe).tabular:
            raise UserError(
                f"--schema {schema}: recipe {config.recipe} has no columns; leave it out, or use {OF_TABLES}"
            )
        from dphybrid.run.build import prepare_data

        folder = prepare_data(config, load_settings()).data.path
        print(f"Train on it: dphybrid train {as_flags(flatten(given_values(config)))}")
        if schema is not None:
            made = (folder / "schema.toml").read_bytes()
            # Its owner may have edited it.
            if schema.exists() and schema.read_bytes() != made:
                raise UserError(f"--schema {schema}: exists and differs; remove it, or name another file")
            write_bytes(schema, made)
            print(f"Roles: {schema}; edit it and give it back with --data.schema-file {schema}")
        return 0
