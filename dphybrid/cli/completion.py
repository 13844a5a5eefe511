"""Print completions for a shell.

bash: echo 'eval "$(dphybrid completion bash)"' >> ~/.bashrc
zsh:  echo 'eval "$(dphybrid completion zsh)"' >> ~/.zshrc
fish: dphybrid completion fish > ~/.config/fish/completions/dphybrid.fish
"""

import argparse
from pathlib import Path

import shtab

from dphybrid.cli.parser import Parser
from dphybrid.recipes.configs import field_types
from dphybrid.recipes.registry import BUILT_IN, recipe_names

_SHELLS = ("bash", "zsh", "fish")
# `command` skips an alias of ls, which may add colours or marks to the names. Only names that need no quotes:
# bash's compgen would run the command of a run called `$(command)`, which may be another user's.
_LIST = (
    'command ls "${DPHYBRID_DATA_DIR:-$HOME/.dphybrid}/runs" 2>/dev/null | '
    "command grep -x '[[:alnum:]._+-]*'"
)
_FISH_FOLDER = "(set -q DPHYBRID_DATA_DIR; and echo $DPHYBRID_DATA_DIR; or echo ~/.dphybrid)"
_PREAMBLE = {
    "bash": f'_dphybrid_runs() {{ compgen -W "$({_LIST})" -- "$1"; }}',
    "zsh": f"_dphybrid_runs() {{ compadd -- $({_LIST}) }}",
}
RUNS = {"bash": "_dphybrid_runs", "zsh": "_dphybrid_runs", "fish": f"(ls {_FISH_FOLDER}/runs 2>/dev/null)"}
"""How each shell completes the name of a run."""


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    parser.add_argument("shell", choices=_SHELLS, help="your shell")


def run(args: argparse.Namespace) -> int:
    """Print the shell's completion script."""
    from dphybrid.cli.main import make_parser

    print(script(args.shell, make_parser()), end="")
    return 0


def script(shell: str, parser: Parser) -> str:
    """Return the completion script for a shell. parser: that of the whole command."""
    for command in (parser.commands or {}).values():
        # The script is written once, whatever --recipe a command line gives later: it offers all flags.
        if any(action.dest == "config.recipe" for action in command.actions):
            _add_other_recipes(command)
        # shtab looks for an attribute `complete`, which argparse's actions do not declare.
        for action in command.actions:
            if action.dest == "config.recipe":
                action.choices = recipe_names()
            elif action.metavar in ("RUN", "RUN_OR_MODEL", "PLACE"):
                vars(action)["complete"] = RUNS
            elif action.type is Path or action.dest.endswith("path"):
                vars(action)["complete"] = shtab.FILE
    return shtab.complete(parser, shell, preamble=_PREAMBLE.get(shell, ""))


def _add_other_recipes(command: Parser) -> None:
    """Add the flags of every built-in recipe to a command that has those of the default recipe."""
    known = {flag for action in command.actions for flag in action.option_strings}
    for recipe in BUILT_IN:
        for name, (_, sentence, _) in field_types(recipe).items():
            flag = f"--{name.replace('_', '-')}"
            if flag not in known:
                known.add(flag)
                command.add_argument(flag, help=sentence.replace("%", "%%"))
