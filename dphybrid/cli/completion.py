"""Completion scripts of shells, made by shtab.

bash: echo 'eval "$(dphybrid --print-completion bash)"' >> ~/.bashrc
zsh:  echo 'eval "$(dphybrid --print-completion zsh)"' >> ~/.zshrc
"""

import shtab

from dphybrid.cli.main import subcommands
from dphybrid.cli.parser import Parser
from dphybrid.recipes.registry import BUILT_IN, find_recipe, recipe_names
from dphybrid.util.errors import UserError

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


def script(shell: str, parser: Parser) -> str:
    """Return the completion script for a shell. parser: that of the whole command. Raises UserError for a
    shell that shtab does not know."""
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UserError(f"--print-completion {shell}: use {', '.join(shtab.SUPPORTED_SHELLS)}")
    for _, command in subcommands(parser):
        # The script is written once, whatever --recipe a command line gives later: it offers all flags.
        if any(action.dest == "recipe" for action in command.actions):
            command.replace_flags()
            for recipe in BUILT_IN:
                command.add_fields(find_recipe(recipe).config_class)
        # shtab looks for an attribute `complete`, which argparse's actions do not declare.
        for action in command.actions:
            if action.dest == "recipe":
                action.choices = recipe_names()
            elif action.dest in ("RUN", "RUN_OR_MODEL", "resume"):
                vars(action)["complete"] = RUNS
            elif action.metavar == "FILE" or action.dest.endswith("path"):
                vars(action)["complete"] = shtab.FILE
    return shtab.complete(parser, shell, preamble=_PREAMBLE.get(shell, ""))
