"""Read the data, show its columns and splits, and stop.

examples:
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked --data.schema-file schema.toml
  %(prog)s --data.path my_texts/

The prepared data is kept: training with the same values reuses it. A file of --data.schema-file that does not
exist yet is written with the columns' roles, to be edited; one that exists is read and never overwritten.
"""

from dphybrid.cli.flags import ConfigCommand, check_data
from dphybrid.config.settings import load_settings
from dphybrid.config.tables import TableDataConfig
from dphybrid.recipes.configs import given_flags
from dphybrid.recipes.registry import find_recipe
from dphybrid.util.files import check_target, given_path, write_bytes
from dphybrid.util.text import as_flags


class Flags(ConfigCommand):
    """The flags of `prepare`."""

    def run(self) -> int:
        """Read the data, show its columns and splits, and stop. A schema file that does not exist yet is
        written, one that exists is read."""
        given = self.given_config()
        config, data, new = given, given.data, None
        named = data.schema_file if isinstance(data, TableDataConfig) else None
        if named and not given_path(named, "data.schema_file").exists():
            new = check_target(named, f"data.schema_file={named}")
            config = config.model_copy(update={"data": data.model_copy(update={"schema_file": None})})
        check_data(config)
        from dphybrid.run.prepare import prepare  # here, as it imports polars and rich

        prepared, _ = prepare(find_recipe(config.recipe), config, load_settings(), details=True)
        if new is not None:
            write_bytes(new, (prepared.path / "schema.toml").read_bytes())
            print(f"Roles: {new}; edit it, and give it again with --data.schema-file {new}")
        print(f"Train on it:\n  dphybrid train {as_flags(given_flags(given))}")
        return 0
