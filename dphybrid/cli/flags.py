"""What every command of the project shares: its parser, the flags of an experiment, and how mistakes and
interruptions are told."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from dphybrid.config import ExperimentConfig, merge
from dphybrid.config.settings import Settings, load_settings
from dphybrid.config.tables import READING_FIELDS, TableDataConfig
from dphybrid.recipes.configs import field_types, load_config, parse_overrides, read_config_file, recipes_with
from dphybrid.recipes.registry import DEFAULT, find_recipe, infer_recipe, recipe_names
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.files import check_target
from dphybrid.util.masking import masked

TRAIN_HELP = """\
examples:
  %(prog)s                                    the word language model, on Python's own reference manual
  %(prog)s --recipe toy --devices 'cpu*3'     the tutorials' toy model, split over three virtual devices
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked
  %(prog)s --data.path my_texts/ --train.epochs 3 --train.batch-size 64
  %(prog)s --resume                           go on with the newest run of the recipe
  %(prog)s --config experiment.toml --report result.json

The flags above are those of one recipe, with its values in brackets: `--help --recipe ctr` shows ctr's.
Without --recipe the data says which one is meant: a label or a table means ctr, a folder of triples kge,
anything else text. A recipe of your own is named as --recipe package.module:NAME. A TOML file has the same
names: `recipe = "ctr"`, then sections like [train] with `batch_size = 512`.
Data, checkpoints and the MLflow store lie under DPHYBRID_DATA_DIR (~/.dphybrid).
"""


MANY_FLAGS = 30
"""More flags than this are not repeated before the description: nobody reads forty lines of them."""


class Parser(argparse.ArgumentParser):
    """argparse, but wrong flags end in one message that says what was meant. recipe: whose values it offers
    as flags."""

    recipe: str | None = None
    commands: "dict[str, Parser] | None" = None

    def actions(self) -> list[argparse.Action]:
        """Everything that this command takes."""
        return list(self._actions)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            (self.commands or {}).get(vars(found).get("command", ""), self).refuse(unknown)
        return found

    def format_help(self) -> str:
        if self.usage is None and len(self._option_string_actions) > MANY_FLAGS:
            places = "".join(
                f" [{action.metavar or action.dest}]" for action in self._get_positional_actions()
            )
            self.usage = f"%(prog)s [--NAME VALUE ...]{places}"
        return super().format_help()

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with what is wrong about arguments that this command does not have."""
        flags = [text for text in unknown if text.startswith("-")]
        if not flags:
            self.error(f"unexpected {' '.join(unknown)!r}; values are given as --name value")
        flag = flags[0].partition("=")[0]
        if self.recipe is not None and "." in flag and (others := recipes_with(_field_of(flag))):
            self.error(f"{flag}: recipe {self.recipe} does not use it; it is a value of {', '.join(others)}")
        known = list(self._option_string_actions)
        same = [name for name in known if name.rpartition(".")[2] == flag.lstrip("-")]
        hint = f"; did you mean {same[0]}?" if same else suggestion(flag, known)
        self.error(f"{flag}: there is no such flag{hint if 'did you mean' in hint else ''}")

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument \S+: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", wrong[2])
            message = f"{wrong[1]!r}: there is no such command{suggestion(wrong[1], known)}"
        self.exit(2, f"error: {message}\nSee `{self.prog} --help`.\n")


def flow_parser(name: str, description: str) -> Parser:
    """Return the parser of `python -m flows.NAME`."""
    return Parser(
        prog=f"python -m flows.{name}",
        description=description,
        epilog=TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _field_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def recipe_of(argv: Sequence[str]) -> str:
    """Return the recipe that a command line means, for the flags that it offers; mistakes are left for
    `load_config`."""
    given: dict[str, str] = {}
    for place, text in enumerate(argv):
        if text.startswith(("--recipe", "--config", "--data.")):
            name, equals, value = text.partition("=")
            given[_field_of(name)] = value if equals else next(iter(argv[place + 1 : place + 2]), "")
    try:
        values = read_config_file(Path(given["config"])) if "config" in given else {}
        values = merge(
            values, parse_overrides([f"{name}={value}" for name, value in given.items() if name != "config"])
        )
        name = values.get("recipe") or infer_recipe(values)[0]
        return find_recipe(name).key
    except (UserError, OSError, TypeError):
        return DEFAULT


def recipes_text() -> str:
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
    return "\n".join(
        ["recipes (`dphybrid train --recipe NAME`, `--help --recipe NAME` for its values):", *lines]
    )


def add_config_flags(parser: argparse.ArgumentParser, recipe: str = DEFAULT) -> None:
    """Add one flag a field of the recipe's config (`--train.batch-size N`), grouped by section, and `--config
    FILE`."""
    if isinstance(parser, Parser):
        parser.recipe = recipe
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML (or JSON) file with the values to set; flags go over it",
    )
    groups: dict[str, Any] = {}
    for name, (kind, sentence, default) in field_types(recipe).items():
        section = name.split(".")[0] if "." in name else "experiment"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        choices = choices_text(kind)
        if name == "recipe":
            choices, shown = f" [{', '.join(recipe_names())}]", ""
        note = "" if shown in (None, "") else f" ({recipe}: {shown})"
        groups[section].add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"config.{name}",
            default=argparse.SUPPRESS,
            metavar=_metavar(kind),
            help=f"{sentence}{choices}{note}".replace("%", "%%"),
        )


def add_reading_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how new files are written, where not as those of training."""
    for name in READING_FIELDS:
        field = TableDataConfig.model_fields[name]
        what = f"{field.description}{choices_text(field.annotation)} (as in training)"
        parser.add_argument(
            f"--data.{name.replace('_', '-')}",
            dest=f"config.data.{name}",
            default=argparse.SUPPRESS,
            metavar=_metavar(field.annotation),
            help=what.replace("%", "%%"),
        )


def reading_from_args(args: argparse.Namespace) -> dict[str, str]:
    """Return what was given of `add_reading_flags`, by field of the data section."""
    prefix = "config.data."
    return {key.removeprefix(prefix): value for key, value in vars(args).items() if key.startswith(prefix)}


def choices_text(kind: Any) -> str:
    """Return a field's choices for people, ` [auto, yes, no]`; nothing where any value will do."""
    return f" [{', '.join(map(str, get_args(kind)))}]" if get_origin(kind) is Literal else ""


def _metavar(kind: Any) -> str:
    known = {int: "N", float: "X", bool: "true|false"}
    return known.get(kind, "TEXT")


def overrides_from_args(args: argparse.Namespace) -> list[str]:
    """Return the flags that were given as override texts."""
    return [
        f"{key.removeprefix('config.')}={value}"
        for key, value in vars(args).items()
        if key.startswith("config.")
    ]


def add_train_flags(parser: argparse.ArgumentParser, recipe: str = DEFAULT) -> None:
    """Add the flags of a training command: the config's, and those of the run."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on with a run (name or MLflow id); alone: the newest of this recipe",
    )
    parser.add_argument(
        "--run-name", metavar="NAME", help="name of the run and its folder (default: recipe, devices, time)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what the run came to as JSON")
    parser.add_argument(
        "--profile",
        metavar="FIRST-LAST",
        help="steps to record with torch's profiler, such as 20-24 (opens in Perfetto)",
    )
    add_experiment_flags(parser, recipe)


def add_experiment_flags(parser: argparse.ArgumentParser, recipe: str = DEFAULT) -> None:
    """Add the config's flags, and where it is recorded: all that a command needs which makes several runs, or
    names them itself."""
    parser.set_defaults(**{name: parser.get_default(name) for name in ("resume", "report", "profile")})
    parser.add_argument(
        "--tracking",
        metavar="URI",
        help="MLflow server or database; none: record nothing (default: DPHYBRID_TRACKING_URI)",
    )
    add_config_flags(parser, recipe)


def config_from_args(args: argparse.Namespace) -> tuple[ExperimentConfig, Settings, str | None, Path | None]:
    """Return (config, settings, resume, report path). Raises UserError."""
    report: Path | None = args.report
    if report is not None:
        check_target(report, f"--report {report}")
    if args.resume is not None and not args.resume.strip():
        raise UserError(
            f"--resume {args.resume!r}: names no run; give its name, or --resume alone for the newest of "
            "the recipe"
        )
    for name, value in (("DPHYBRID_TRACKING_URI", args.tracking), ("DPHYBRID_PROFILE", args.profile)):
        if value is not None:
            os.environ[name] = value  # a setting: the flow's tasks read it, too
    return load_config(args.config, overrides_from_args(args)), load_settings(), args.resume, report


def tags_from_args(args: argparse.Namespace) -> dict[str, str]:
    """Return the tags that were given. Raises UserError for one without a value."""
    tags = {}
    for text in args.tag:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--tag {text}: write NAME=VALUE")
        tags[name] = masked(value)
    return tags


def run_cli(function: Callable[[], int | None]) -> int:
    """Call `function`; tell a UserError in one message with exit code 2, an interruption with 130 (128 + the
    signal that asked for it)."""
    try:
        return function() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interruption:
        print(f"\n{interruption}" if str(interruption) else "\ninterrupted", file=sys.stderr)
        # Only `Interrupted` carries a signal's number; shells report 128 + that number, and Ctrl-C is 2.
        return 128 + (vars(interruption).get("signal_number") or 2)
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        print(masked(f"error: {error.filename}: {error.strerror}"), file=sys.stderr)
        return 2
