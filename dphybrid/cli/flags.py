"""Command-line flags: one for each field of the recipe's config, and those that describe a run."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dphybrid.cli.parser import Parser, field_of
from dphybrid.config import ExperimentConfig, merge
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import field_types, load_config, parse_overrides, read_config_file
from dphybrid.recipes.registry import BUILT_IN, DEFAULT, find_recipe, infer_recipe, recipe_names
from dphybrid.run.folder import named_run
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, given_path


def recipe_of(argv: Sequence[str]) -> str:
    """Return the recipe that `argv` selects, which decides the flags to offer. Mistakes are ignored here;
    `load_config` reports them."""
    # Read without argparse, which can parse only after it knows the recipe's flags.
    given: dict[str, str] = {}
    if list(argv[:2]) == ["check", "recipe"]:
        given["recipe"] = next((text for text in argv[2:3] if not text.startswith("-")), "")
    for place, text in enumerate(argv):
        if text.startswith(("--recipe", "--config", "--data.", "--resume")):
            name, equals, value = text.partition("=")
            given[field_of(name)] = value if equals else next(iter(argv[place + 1 : place + 2]), "")
    try:
        file, resume = given.pop("config", None), given.pop("resume", "")
        values = read_config_file(Path(file)) if file else {}
        values = merge(values, parse_overrides([f"{name}={value}" for name, value in given.items()]))
        name = values.get("recipe") or _recipe_of_run(resume) or infer_recipe(values)[0]
        return find_recipe(name).key
    # TypeError: a file may set `recipe` to a list, which `find_recipe`'s cache cannot hash.
    except (UserError, OSError, TypeError):
        return DEFAULT


def _recipe_of_run(name: str) -> str | None:
    """Return the recipe of the run to resume, or None when `name` is no run."""
    try:
        return named_run(load_settings(), name, "").config.recipe if name else None
    except UserError:  # a bare --resume: `name` is then the next flag
        return None


def add_flag(
    group: "argparse._ActionsContainer", name: str, kind: Any, sentence: str, note: str = ""
) -> None:
    """Add the flag of a config field. kind: the field's type, which its help shows."""
    # No `type=`: pydantic parses the text, so that bounds and messages are the same as in a config file.
    # SUPPRESS keeps flags that were not given out of the namespace; defaults would override a file's values.
    group.add_argument(
        f"--{name.replace('_', '-')}",
        dest=f"config.{name}",
        default=argparse.SUPPRESS,
        metavar={int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT"),
        help=f"{sentence}{choices_text(kind)}{note}".replace("%", "%%"),
    )


def add_config_flags(parser: Parser) -> None:
    """Add `--config FILE`, and a flag for each config field of the parser's recipe
    (`--train.batch-size N`), grouped by section."""
    recipe = parser.recipe
    # A bare --resume continues the newest run of this recipe.
    parser.set_defaults(resume_recipe=recipe)
    config = "TOML (or JSON) file with the values to set; flags override it"
    parser.add_argument("--config", type=Path, metavar="FILE", help=config)
    groups: dict[str, Any] = {}
    for name, (kind, sentence, default) in field_types(recipe).items():
        section = name.split(".")[0] if "." in name else "experiment"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        note = "" if shown in (None, "") else f" ({recipe}: {shown})"
        if name == "recipe":
            note = f" [{', '.join(recipe_names())}]"
        add_flag(groups[section], name, kind, sentence, note)


def choices_text(kind: object) -> str:
    """Return the choices of a Literal type as help text, ` [auto, yes, no]`; "" for another type."""
    return f" [{', '.join(map(str, get_args(kind)))}]" if get_origin(kind) is Literal else ""


def overrides_from_args(args: argparse.Namespace) -> list[str]:
    """Return the config flags that were given, as overrides `NAME=VALUE`."""
    given = {key: value for key, value in vars(args).items() if key.startswith("config.")}
    return [f"{key.removeprefix('config.')}={value}" for key, value in given.items()]


def add_train_flags(parser: Parser) -> None:
    """Add the flags of a command that trains one run: the config's, and those of the run."""
    add = parser.add_argument
    resume = "continue a run (name or MLflow id) with its values; without RUN: the recipe's newest"
    add("--resume", nargs="?", const="latest", metavar="RUN", help=resume)
    name = "name of the run and its folder (default: made of recipe, devices and time)"
    add("--run-name", metavar="NAME", help=name)
    add("--report", type=Path, metavar="FILE", help="write the run's report as JSON")
    profile = "steps to record with torch's profiler, such as 20-24 (opens in Perfetto)"
    add("--profile", metavar="FIRST-LAST", help=profile)
    add_experiment_flags(parser)


def add_experiment_flags(parser: Parser) -> None:
    """Add the config's flags and --tracking, for commands that make several runs or name them
    themselves."""
    # `config_from_args` reads these three; such commands have no flags for them.
    parser.set_defaults(resume=None, report=None, profile=None)
    tracking = "MLflow server or database; none: record nothing (default: DPHYBRID_TRACKING_URI)"
    parser.add_argument("--tracking", metavar="URI", help=tracking)
    add_config_flags(parser)


def config_from_args(args: argparse.Namespace) -> tuple[ExperimentConfig, Settings]:
    """Return config and settings; replace `args.resume` by the name of its run. Raises UserError."""
    if args.report is not None:
        check_target(args.report, f"--report {args.report}")
    for name, value in (("DPHYBRID_TRACKING_URI", args.tracking), ("DPHYBRID_PROFILE", args.profile)):
        if value is not None:
            os.environ[name] = value  # not passed on as an argument: a flow's tasks read settings themselves
    settings, base = load_settings(), None
    if args.resume is not None:
        run = named_run(settings, args.resume, args.resume_recipe)
        args.resume, base = run.folder.name, run.config
    return data_config(args, base), settings


def given_config(args: argparse.Namespace, base: ExperimentConfig | None = None) -> ExperimentConfig:
    """Return the config that a command line gives; `base` as in `load_config`. Raises UserError."""
    return load_config(args.config, overrides_from_args(args), base)


def check_data_path(path: str) -> None:
    """Raise UserError when `path` does not exist. The readers check as well, but seconds later: they import
    polars."""
    plain = not any(sign in path for sign in "*?[")
    if path and plain and not given_path(path, "data.path").exists():
        raise UserError(f"data.path={path}: there is no such file")


def data_config(args: argparse.Namespace, base: ExperimentConfig | None = None) -> ExperimentConfig:
    """Return `given_config`. Raises UserError, also when a built-in recipe's data does not exist or its table
    cannot be opened, before the seconds that importing torch takes."""
    config = given_config(args, base)
    if config.recipe in BUILT_IN:
        check_data_path(str(config.data.model_dump().get("path") or ""))
        recipe = find_recipe(config.recipe)
        if recipe.tabular:
            recipe.source(config.data, config.train.seed)
    return config
