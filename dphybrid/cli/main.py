"""The command `dphybrid`. Each subcommand is the module of this package that has its name."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from dphybrid.cli.flags import recipe_of
from dphybrid.cli.parser import Parser, run_cli
from dphybrid.recipes.registry import find_recipe, recipe_names
from dphybrid.util.errors import UserError
from dphybrid.util.importing import kept_from_gc

COMMANDS = [
    *("prepare", "plan", "init", "train", "runs", "compare", "ui", "predict", "export", "sweep", "rollback"),
    *("sync", "check", "new", "devices", "doctor", "verify", "selftest", "worker", "deploy"),
    "completion",
]
"""The subcommands' modules, in the order of the help.

A module's docstring is its help page: the first paragraph is the summary, the rest is printed below the
flags. `flags(parser)` adds the flags. `run(args)` does the work and returns the exit code; it also makes the
slow imports, which `--help` and completion must not wait for.
"""


def make_parser(argv: Sequence[str] = ()) -> Parser:
    """Return the parser of the whole command, with the config flags of the recipe that `argv` selects."""
    recipe = recipe_of(argv)
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="dphybrid",
        description="Hybrid models: tables in host memory, dense blocks data-parallel on GPUs, every split "
        "on record.",
        epilog=_recipes_text(),
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"dphybrid {version('dphybrid')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    # All of them, not only the one in argv: help, completion and suggestions need every name, and importing
    # these modules is quick.
    for name in COMMANDS:
        module = import_module(f"dphybrid.cli.{name}")
        sentence, _, page = (module.__doc__ or "").partition("\n\n")
        sentence = " ".join(sentence.split()).rstrip(".")
        shown = sentence[0].lower() + sentence[1:]
        command = subparsers.add_parser(name, help=shown, description=f"{sentence}.", epilog=page)
        command.formatter_class = raw
        # Before `flags`, which adds this recipe's flags.
        command.recipe = recipe
        module.flags(command)
        command.set_defaults(run=module.run)
    parser.commands = subparsers.choices
    return parser


def _recipes_text() -> str:
    """Return the list of recipes for the help page, each with its summary."""
    names = recipe_names()
    wide = max(map(len, names)) + 2
    lines = []
    for name in names:
        try:
            summary = find_recipe(name).summary
        except UserError as error:  # announced by an installed package that cannot be imported
            summary = f"cannot be used: {error}"
        first, *rest = textwrap.wrap(summary, 100 - wide - 2) or [""]
        lines += [f"  {name:<{wide}}{first}", *(" " * (wide + 2) + line for line in rest)]
    title = "recipes (`dphybrid train --recipe NAME`, `--help --recipe NAME` for its values):"
    return "\n".join([title, *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for wrong input, 130 when interrupted."""
    given = (sys.argv[1:] if argv is None else argv) or ["--help"]

    def run() -> int:
        with kept_from_gc():  # parsing imports a user's recipe, and torch with it
            args = make_parser(given).parse_args(given)
        code: int = args.run(args)
        return code

    return run_cli(run)
