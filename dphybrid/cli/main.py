"""The command `dphybrid`. Each subcommand is the module of this package that has its name."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pkgutil import get_data
from typing import Any

from dphybrid.cli.parser import Command, run_cli
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.importing import kept_from_gc

COMMANDS = {
    "data": ["prepare"],
    "train": ["train", "sweep"],
    "use": ["runs", "compare", "ui", "evaluate", "predict", "export"],
    "operate": ["devices", "doctor", "sync", "worker", "deploy"],
}
"""Group -> the subcommands' modules, in the order of the help.

A module's docstring is its help page: the first paragraph is the summary, the rest is printed below the
flags. Its class `Flags` is a `Command`.
"""


def command_of(words: Sequence[str]) -> Command:
    """Return the command that a command line gives. Raises UserError, and SystemExit after a help page."""
    name, *rest = words
    names = [name for group in COMMANDS.values() for name in group]
    if name in ("-h", "--help", "--version"):
        print(f"dphybrid {version('dphybrid')}" if name == "--version" else overview())
        raise SystemExit(0)
    if name not in names:
        what = "flag" if name.startswith("-") else "command"
        raise UserError(f"{name!r}: there is no such {what}{suggestion(name, names)}\nSee `dphybrid --help`.")
    flags = import_module(f"{__package__}.{name}").Flags
    command: Command = flags.parse(f"dphybrid {name}", _doc_of(name), rest)
    return command


def overview() -> str:
    """Return the help page of `dphybrid`."""
    what = "Hybrid models: tables in host memory, dense blocks data-parallel on GPUs, every split on record."
    lines = ["usage: dphybrid COMMAND ... (`dphybrid COMMAND --help` shows its flags)", "", what]
    for group, names in COMMANDS.items():
        lines += ["", f"{group}:"]
        for name in names:
            summary = " ".join(_doc_of(name).partition("\n\n")[0].split()).rstrip(".")
            lines.append(f"  {name:<10}{summary[0].lower()}{summary[1:]}")
    return "\n".join(lines)


def _doc_of(name: str) -> str:
    """Return the docstring of a subcommand's module. Read, not imported: making all commands' classes takes a
    tenth of a second, and one of them runs."""
    source = get_data(__package__, f"{name}.py") or b""
    return source.decode().split('"""')[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for wrong input, 130 when interrupted."""
    words = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]

    def run() -> int:
        with kept_from_gc():  # parsing imports a user's recipe, and torch with it
            command: Any = command_of(words)
        code: int = command.run()
        return code

    return run_cli(run)
