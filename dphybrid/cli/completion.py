"""`dphybrid completion SHELL`: what a shell completes after `dphybrid`: commands, flags, recipes and runs."""

import argparse
from collections.abc import Iterable, Mapping

from dphybrid.cli.flags import Parser
from dphybrid.recipes.configs import field_types
from dphybrid.recipes.registry import BUILT_IN, recipe_names

SHELLS = ("bash", "zsh", "fish")
TAKES_RUN = ("predict", "compare", "ui", "verify")
"""Commands whose first words are names of runs."""

_BASH = """\
# dphybrid: completion for bash and zsh
_dphybrid() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=
  if ((COMP_CWORD == 1)); then
    words="%(commands)s"
  elif [[ $before == --recipe ]]; then
    words="%(recipes)s"
  elif [[ $before == --resume ]]; then
    words="$(_dphybrid_runs)"
  elif [[ $before == --*path || $before == --config || $before == --out || $before == --report ]]; then
    COMPREPLY=($(compgen -f -- "$word")); return
  elif [[ $word == -* ]]; then
    case $command in
%(cases)s
    esac
  else
    case $command in
      %(takes_run)s) words="$(_dphybrid_runs)" ;;
%(words)s
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
_dphybrid_runs() { command ls "${DPHYBRID_DATA_DIR:-$HOME/.dphybrid}/runs" 2>/dev/null; }
"""
_FISH_FOLDER = "(set -q DPHYBRID_DATA_DIR; and echo $DPHYBRID_DATA_DIR; or echo ~/.dphybrid)"
_ZSH = "autoload -U +X compinit && compinit -i; autoload -U +X bashcompinit && bashcompinit\n"
_COMPLETE = "complete -o default -F _dphybrid dphybrid\n"


def script(shell: str, parser: Parser) -> str:
    """Return the script that a shell is to read. parser: the whole command's."""
    commands = parser.commands or {}
    flags = {name: _flags(command) for name, command in commands.items()}
    if shell == "fish":
        return _fish(flags)
    choices = {
        name: action.choices
        for name, command in commands.items()
        for action in command.actions()
        if action.choices and not action.option_strings
    }
    facts = {
        "commands": " ".join(commands),
        "recipes": " ".join(recipe_names()),
        "cases": _cases(flags),
        "takes_run": "|".join(TAKES_RUN),
        "words": _cases(choices),
    }
    return (_ZSH if shell == "zsh" else "") + _BASH % facts + _COMPLETE


def _cases(words: Mapping[str, Iterable[str]]) -> str:
    """A line a command of bash's `case`, with what may follow it."""
    return "\n".join(f'      {name}) words="{" ".join(found)}" ;;' for name, found in words.items())


def _flags(command: Parser) -> list[str]:
    """The command's flags; where it takes a recipe's values, those of every recipe."""
    found = [
        flag
        for action in command.actions()
        if action.help is not argparse.SUPPRESS
        for flag in action.option_strings
        if flag.startswith("--")
    ]
    if command.recipe is not None:
        found += [f"--{name.replace('_', '-')}" for recipe in BUILT_IN for name in field_types(recipe)]
    return sorted(set(found))


def _fish(flags: Mapping[str, list[str]]) -> str:
    lines = ["# dphybrid: completion for fish", "complete -c dphybrid -f"]
    lines += [f"complete -c dphybrid -n __fish_use_subcommand -a {name}" for name in flags]
    for name, found in flags.items():
        seen = f"'__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c dphybrid -n {seen} -F -l {flag[2:]}" for flag in found]
        if name in TAKES_RUN:
            lines.append(f"complete -c dphybrid -n {seen} -a '(ls {_FISH_FOLDER}/runs 2>/dev/null)'")
    return "\n".join(lines) + "\n"
