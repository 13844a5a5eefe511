"""List what of a model differs or breaks under data parallelism.

examples:
  %(prog)s my_models:build_block              a function without arguments, or one that takes a ModelContext
  %(prog)s --recipe text                      the model of a recipe

Each finding says whether it BREAKS (fails, or computes on the wrong weights, on two GPUs) or differs (other
results than on one device), where, and the remedy. The exit code is 1 when something breaks.
"""

import argparse

from dphybrid.cli.flags import add_config_flags, given_config
from dphybrid.cli.parser import Parser
from dphybrid.config.settings import load_settings


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    target = "function that returns the module (default: the recipe's model)"
    parser.add_argument("target", nargs="?", metavar="package.module:factory", help=target)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print what of a model differs or breaks under data parallelism; 1 when something breaks."""
    from dphybrid.run.check import check_target

    breaks = 0
    for block, findings in check_target(args.target, given_config(args), load_settings()):
        print(f"{block}: {'nothing found' if not findings else f'{len(findings)} found'}")
        for finding in findings:
            print(f"  {finding.text()}")
        breaks += sum(finding.breaks for finding in findings)
    return 1 if breaks else 0
