"""Write a TOML file that lists and explains every value of an experiment.

examples:
  %(prog)s --recipe ctr
  %(prog)s --data.path clicks.csv --data.label clicked --out clicks.toml

Values given as flags are set in the file; the others are commented out and show the recipe's default.
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
    out = "file to write (default: experiment.toml)"
    parser.add_argument("--out", type=Path, default=Path("experiment.toml"), metavar="FILE", help=out)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Write an experiment's TOML file."""
    target: Path = args.out
    if target.exists():
        raise UserError(f"--out {target}: exists already; remove it, or name another file")
    check_target(target, f"--out {target}")
    config = given_config(args)
    write_text(target, config_text(config))
    print(f"{target}: edit it, then `dphybrid train --config {shlex.quote(str(target))}`")
    return 0


def config_text(config: ExperimentConfig) -> str:
    """Return a config as a commented TOML file: values that differ from the recipe's are set, the others are
    comments. `load_config` reads the same config back."""
    recipe, given = config.recipe, flatten(given_values(config))
    lines = [
        f"# {find_recipe(recipe).summary}",
        "# Train: dphybrid train --config FILE (flags override it). Remove a line's # to set its value.",
        "",
        f"recipe = {_toml(recipe)}",
    ]
    section = ""
    fields = {name: facts for name, facts in field_types(recipe).items() if name != "recipe"}
    # In TOML a header holds until the next one, so the values without a section must come first.
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
    """Return a value as TOML. TOML has no null: None becomes an empty string."""
    return toml_text("" if value is None else value)
