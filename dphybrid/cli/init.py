"""Write an experiment's TOML file with a sentence for each value.

examples:
  %(prog)s --recipe ctr
  %(prog)s --data.path clicks.csv --data.label clicked --out clicks.toml

The file has each value with a sentence; those that are given are set, the others are comments that show
the recipe's own.
"""

import argparse
import shlex
import textwrap
from pathlib import Path

from dphybrid.cli.flags import add_config_flags, choices_text, given_config
from dphybrid.cli.parser import Parser
from dphybrid.config import ExperimentConfig, flatten
from dphybrid.recipes.configs import field_types, given_values
from dphybrid.recipes.registry import find_recipe
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, write_text
from dphybrid.util.text import toml_text

_WIDTH = 100


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    out = "file to write (experiment.toml)"
    parser.add_argument("--out", type=Path, default=Path("experiment.toml"), metavar="FILE", help=out)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Write an experiment's TOML file."""
    target: Path = args.out
    if target.exists():
        raise UserError(f"--out {target}: is there already; remove it, or name another file")
    check_target(target, f"--out {target}")
    config = given_config(args)
    write_text(target, config_text(config))
    print(f"{target}: edit it, then `dphybrid train --config {shlex.quote(str(target))}`")
    return 0


def config_text(config: ExperimentConfig) -> str:
    """Return a config as a commented TOML file: what differs from the recipe as values, the rest as comments
    that show the recipe's own. `load_config` reads the same config back."""
    recipe, given = config.recipe, flatten(given_values(config))
    lines = [
        f"# {find_recipe(recipe).summary}",
        "# Train: dphybrid train --config FILE; flags go over it. A line without its # sets a value.",
        "",
        f"recipe = {_toml(recipe)}",
    ]
    section = ""
    fields = {name: facts for name, facts in field_types(recipe).items() if name != "recipe"}
    # TOML takes every value below a section's header for one of that section: values without one come first.
    for name, (kind, sentence, default) in sorted(fields.items(), key=lambda item: "." in item[0]):
        place, _, leaf = name.rpartition(".")
        if place != section:
            lines += ["", f"[{place}]"]
            section = place
        words = f"{sentence}{choices_text(kind)}"
        lines += ["", *textwrap.wrap(words, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"{leaf} = {_toml(given[name])}" if name in given else f"# {leaf} = {_toml(default)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """A value as TOML writes it; no value is an empty text."""
    return toml_text("" if value is None else value)
