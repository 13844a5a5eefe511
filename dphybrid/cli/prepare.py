"""Read the data, show its columns and splits, and stop.

examples:
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked
  %(prog)s --data.path my_texts/

The prepared data is kept: training with the same values reuses it.
"""

from dphybrid.cli.flags import ConfigCommand
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import check_data, given_flags
from dphybrid.recipes.registry import find_recipe
from dphybrid.util.text import as_flags


class Flags(ConfigCommand):
    """The flags of `prepare`."""

    def run(self) -> int:
        """Read the data, show its columns and splits, and stop."""
        config = self.given_config()
        check_data(config)
        from dphybrid.run.prepare import prepare  # here, as it imports polars and rich

        prepare(find_recipe(config.recipe), config, load_settings(), details=True)
        print(f"Train on it:\n  dphybrid train {as_flags(given_flags(config))}")
        return 0
