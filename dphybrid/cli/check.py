"""Show how batches are split over the devices, and what breaks or differs under data parallelism.

examples:
  %(prog)s --recipe text --devices 'cpu*8'    the model of a recipe, and how its batches are split
  %(prog)s --data.path clicks.csv --data.label clicked
  %(prog)s my_models:build_block              a function without arguments, or one that takes a ModelContext
  %(prog)s recipe my_package.my_module:Mine   a recipe: data, resume, prefetching, devices, predictions

Each finding names the place and the remedy. A recipe is trained on a sample of its data, stopped, resumed
and compared, in a temporary folder. The exit code is 1 when something breaks.
"""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from dphybrid.cli.flags import ConfigCommand
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.util.errors import UserError, failure_text

_NEEDED = ("prepare", "evaluate", "train", "train_twice")
"""Checks of a recipe on which the later ones build: when one breaks, the rest is left out."""


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
        from dphybrid.lifecycle.check import check_target

        breaks = 0
        split, found = check_target(next(iter(self.target), None), config, load_settings(), self.rows)
        if split:
            print(split)
        for block, findings in found:
            print(f"{block}: {f'{len(findings)} finding(s)' if findings else 'no findings'}")
            for finding in findings:
                print(f"  {finding}")
            breaks += sum("statistics" not in finding for finding in findings)  # BatchNorm's only differ
        return 1 if breaks else 0

    def _check_recipe(self, recipes: list[str]) -> int:
        if len(recipes) != 1:
            raise UserError("check recipe: give one recipe, as NAME or package.module:NAME")
        # The same as --recipe, so that other flags override this recipe's values.
        values: dict[str, Any] = self.values | {"recipe": recipes[0]}
        config, breaks = load_config(self.config, values), 0
        from dphybrid.lifecycle.trial import CHECKS, trial_of

        with trial_of(config) as trial:
            for check in CHECKS:
                state, words = _result_of(check, trial)
                print(f"{state:<7}{check.__name__.replace('_', ' '):<14}{words}", flush=True)
                breaks += state == "BREAKS"
                if breaks and check.__name__ in _NEEDED:
                    break
        return 1 if breaks else 0


def _result_of(check: Callable[[Any], str], trial: object) -> tuple[str, str]:
    """Run one check of a recipe; return ok, BREAKS or - (not tried), and its words or the problem."""
    try:
        with redirect_stdout(StringIO()):  # hides the progress of the trainings
            words = check(trial)
    except UserError as error:
        return "BREAKS", " ".join(str(error).split())
    except Exception as error:  # noqa: BLE001 - a user's recipe may raise anything
        return "BREAKS", failure_text(error)
    return "-" if words.startswith("not tried") else "ok", words
