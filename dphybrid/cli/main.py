"""The command `dphybrid`. Each subcommand is the module of this package that has its name."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pkgutil import get_data

from dphybrid.cli.parser import Command, Parser, page_of, recipes_text, run_cli
from dphybrid.util.importing import kept_from_gc

COMMANDS = {
    "data": ["prepare"],
    "train": ["train", "sweep", "check", "new"],
    "use": ["runs", "compare", "ui", "evaluate", "predict", "export", "rollback"],
    "operate": ["devices", "doctor", "sync", "worker", "deploy"],
}
"""Group -> the subcommands' modules, in the order of the help.

A module's docstring is its help page: the first paragraph is the summary, the rest is printed below the
flags. Its class `Flags` is a `Command`.
"""


def make_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(prog="dphybrid", usage="dphybrid COMMAND ...", epilog=recipes_text())
    parser.add_argument("--version", action="version", version=f"dphybrid {version('dphybrid')}")
    commands = parser.add_subparsers(
        dest="name", required=True, metavar="COMMAND", parser_class=Parser, help=argparse.SUPPRESS
    )
    listed = [
        "Hybrid models: tables in host memory, dense blocks data-parallel on GPUs, every split on record."
    ]
    for group, names in COMMANDS.items():
        listed += ["", f"{group}:"]
        for name in names:
            sentence, page = page_of(_doc_of(name))
            commands.add_parser(
                name,
                prog=f"dphybrid {name}",
                load=partial(_flags_of, name),
                help=sentence,
                description=f"{sentence}.",
                epilog=page,
            )
            listed.append(f"  {name:<10}{sentence[0].lower()}{sentence[1:]}")
    parser.description = "\n".join(listed)
    return parser


def _doc_of(name: str) -> str:
    """Return the docstring of a subcommand's module. Read, not imported: making all commands' classes takes a
    tenth of a second, and one of them runs."""
    source = get_data(__package__, f"{name}.py") or b""
    return source.decode().split('"""')[1]


def _flags_of(name: str) -> type[Command]:
    flags: type[Command] = import_module(f"{__package__}.{name}").Flags
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for wrong input, 130 when interrupted."""
    given = (sys.argv[1:] if argv is None else argv) or ["--help"]

    def run() -> int:
        with kept_from_gc():  # parsing imports a user's recipe, and torch with it
            command = make_parser().parse(given)
        return command.run()

    return run_cli(run)
