"""Show how batches are split over the devices, and what breaks or differs under data parallelism.

examples:
  %(prog)s --recipe text --devices 'cpu*8'    the model of a recipe, and how its batches are split
  %(prog)s --data.path clicks.csv --data.label clicked
  %(prog)s my_models:build_block              a function without arguments, or one that takes a ModelContext
  %(prog)s recipe my_package.my_module:Mine   a recipe: data, resume, prefetching, devices, predictions

Each finding names the place and the remedy. BREAKS: it fails, or computes with wrong weights, on two GPUs.
differs: it gives other results than one device. A recipe is trained on a sample of its data, stopped, resumed
and compared, in a temporary folder. The exit code is 1 when something breaks.
"""

from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from dphybrid.cli.flags import ConfigCommand
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.util.errors import UserError


class Flags(ConfigCommand):
    """The flags of `check`."""

    shown_as: ClassVar[dict[str, str]] = {"target": "package.module:factory"}
    target: CliPositionalArg[list[str]] = Field(default=[])
    """Function that returns the module (default: the recipe's model), or: recipe NAME."""
    rows: int | None = Field(default=None, ge=1)
    """Rows of an epoch, to show how its batches are split (default: of the data)."""

    def run(self) -> int:
        """Print the split of a batch and the findings for a model, or the results of a recipe's trial; return
        1 when something breaks, else 0."""
        if self.target[:1] == ["recipe"]:
            return self._check_recipe(self.target[1:])
        if len(self.target) > 1:
            many = f"check takes one function, not {len(self.target)}"
            raise UserError(f"{many}; to check a recipe: `dphybrid check recipe NAME`")
        config = self.data_config()
        # Here and not above: it imports torch, which `--help` must not wait for.
        from dphybrid.run.check import check_target

        breaks = 0
        split, found = check_target(next(iter(self.target), None), config, load_settings(), self.rows)
        if split:
            print(split)
        for block, findings in found:
            print(f"{block}: {f'{len(findings)} finding(s)' if findings else 'no findings'}")
            for finding in findings:
                print(f"  {finding.text()}")
            breaks += sum(finding.breaks for finding in findings)
        return 1 if breaks else 0

    def _check_recipe(self, recipes: list[str]) -> int:
        if len(recipes) != 1:
            raise UserError("check recipe: give one recipe, as NAME or package.module:NAME")
        # The same as --recipe, so that other flags override this recipe's values.
        values: dict[str, Any] = self.values | {"recipe": recipes[0]}
        config, breaks = load_config(self.config, values), 0
        from dphybrid.cli.trial import check_recipe

        for result in check_recipe(config, load_settings()):
            print(result.line(), flush=True)
            # None, a check that was not tried, is no failure.
            breaks += result.holds is False
        return 1 if breaks else 0
