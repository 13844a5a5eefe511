"""The command `dphybrid`: collects its subcommands, each a module of this package that is named after it."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from dphybrid.cli.flags import recipe_of
from dphybrid.cli.parser import Parser, run_cli
from dphybrid.recipes.registry import find_recipe, recipe_names
from dphybrid.util.errors import UserError
from dphybrid.util.importing import kept_from_gc

COMMANDS = [
    *("prepare", "plan", "init", "train", "compare", "ui", "predict", "export", "sweep", "rollback", "sync"),
    *("check", "new", "devices", "doctor", "verify", "selftest", "worker", "deploy", "validate"),
    "completion",
]
"""Modules of this package, in the order of the help.

A module's docstring is its page of help: the first paragraph is the sentence, the rest stands below the
flags. `flags(parser)` adds the flags. `run(args)` does the work and returns the exit code; heavy imports wait
there.
"""


def make_parser(argv: Sequence[str] = ()) -> Parser:
    """Return the parser of the whole command, with the flags of the recipe that the command line means."""
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
    # All of them, whichever is meant: help, completion and hints need every name, and no module imports much.
    for name in COMMANDS:
        module = import_module(f"dphybrid.cli.{name}")
        sentence, _, page = (module.__doc__ or "").partition("\n\n")
        sentence = " ".join(sentence.split()).rstrip(".")
        shown = sentence[0].lower() + sentence[1:]
        command = subparsers.add_parser(name, help=shown, description=f"{sentence}.", epilog=page)
        command.formatter_class = raw
        # Before `flags`, which adds those of this recipe.
        command.recipe = recipe
        module.flags(command)
        command.set_defaults(run=module.run)
    parser.commands = subparsers.choices
    return parser


def _recipes_text() -> str:
    """Return the recipes for a help page, each with its sentence."""
    names = recipe_names()
    wide = max(map(len, names)) + 2
    lines = []
    for name in names:
        try:
            summary = find_recipe(name).summary
        except UserError as error:  # of another package, which cannot be imported now
            summary = f"cannot be used: {error}"
        first, *rest = textwrap.wrap(summary, 100 - wide - 2) or [""]
        lines += [f"  {name:<{wide}}{first}", *(" " * (wide + 2) + line for line in rest)]
    title = "recipes (`dphybrid train --recipe NAME`, `--help --recipe NAME` for its values):"
    return "\n".join([title, *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for wrong input, 130 when interrupted."""
    given = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # recipes and models of your own, as `python -m` finds them; last, so that nothing is shadowed
        sys.path.append(str(Path.cwd()))

    def run() -> int:
        with kept_from_gc():  # also a recipe of one's own
            args = make_parser(given).parse_args(given)
        code: int = args.run(args)
        return code

    return run_cli(run)
