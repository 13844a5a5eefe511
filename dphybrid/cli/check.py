"""List what of a model differs or breaks under data parallelism, or what of a recipe does.

examples:
  %(prog)s my_models:build_block              a function without arguments, or one that takes a ModelContext
  %(prog)s --recipe text                      the model of a recipe
  %(prog)s recipe my_package.my_module:Mine   a recipe: data, resume, prefetching, devices, predictions

Each finding says whether it BREAKS (fails, or computes on the wrong weights, on two GPUs) or differs (other
results than on one device), where, and the remedy. A recipe is trained on a sample of its data, stopped,
resumed and compared, in a folder that is removed. The exit code is 1 when something breaks.
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
    """Print what of a model or a recipe differs or breaks; 1 when something breaks."""
    target, *more = args.target or [None]
    if target == "recipe":
        return _check_recipe(args, more)
    if more:
        raise UserError(f"check: one function at a time, not {len(more) + 1}; `check recipe` takes a recipe")
    from dphybrid.run.check import check_target

    breaks = 0
    for block, findings in check_target(target, given_config(args), load_settings()):
        print(f"{block}: {f'{len(findings)} finding(s)' if findings else 'no findings'}")
        for finding in findings:
            print(f"  {finding.text()}")
        breaks += sum(finding.breaks for finding in findings)
    return 1 if breaks else 0


def _check_recipe(args: argparse.Namespace, places: list[str]) -> int:
    if len(places) != 1:
        raise UserError("check recipe: name one, as NAME or package.module:NAME")
    # As --recipe sets it: flags go over this recipe's values.
    vars(args)["config.recipe"] = places[0]
    config, breaks = given_config(args), 0
    from dphybrid.cli.trial import check_recipe

    for found in check_recipe(config, load_settings()):
        print(found.line(), flush=True)
        breaks += found.holds is False
    return 1 if breaks else 0
