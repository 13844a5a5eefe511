"""Find what breaks or gives other results under data parallelism, in a model or in a recipe.

examples:
  %(prog)s my_models:build_block              a function without arguments, or one that takes a ModelContext
  %(prog)s --recipe text                      the model of a recipe
  %(prog)s recipe my_package.my_module:Mine   a recipe: data, resume, prefetching, devices, predictions

Each finding names the place and the remedy. BREAKS: it fails, or computes with wrong weights, on two GPUs.
differs: it gives other results than one device. A recipe is trained on a sample of its data, stopped, resumed
and compared, in a temporary folder. The exit code is 1 when something breaks.
"""

import argparse

from dphybrid.cli.flags import add_config_flags, given_config
from dphybrid.cli.parser import Parser
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    target = "function that returns the module (default: the recipe's model), or: recipe NAME"
    parser.add_argument("target", nargs="*", metavar="package.module:factory", help=target)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings for a model or a recipe; return 1 when one breaks, else 0."""
    target, *more = args.target or [None]
    if target == "recipe":
        return _check_recipe(args, more)
    if more:
        raise UserError(
            f"check takes one function, not {len(more) + 1}; to check a recipe: `dphybrid check recipe NAME`"
        )
    # Here and not above: it imports torch, which `--help` must not wait for.
    from dphybrid.run.check import check_target

    breaks = 0
    for block, findings in check_target(target, given_config(args), load_settings()):
        print(f"{block}: {f'{len(findings)} finding(s)' if findings else 'no findings'}")
        for finding in findings:
            print(f"  {finding.text()}")
        breaks += sum(finding.breaks for finding in findings)
    return 1 if breaks else 0


def _check_recipe(args: argparse.Namespace, recipes: list[str]) -> int:
    if len(recipes) != 1:
        raise UserError("check recipe: give one recipe, as NAME or package.module:NAME")
    # The same as --recipe, so that other flags override this recipe's values.
    vars(args)["config.recipe"] = recipes[0]
    config, breaks = given_config(args), 0
    from dphybrid.cli.trial import check_recipe

    for result in check_recipe(config, load_settings()):
        print(result.line(), flush=True)
        # None, a check that was not tried, is no failure.
        breaks += result.holds is False
    return 1 if breaks else 0
