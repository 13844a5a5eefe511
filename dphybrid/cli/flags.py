"""Command-line flags: one for each field of the recipe's config, and those of a run."""

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
    """Return the recipe that a command line means, for the flags that it offers; mistakes are left for
    `load_config`."""
    # argparse comes too late: the recipe says which flags it has to know.
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
    # TypeError: a recipe that is a list, in a file, is no key of `find_recipe`'s cache.
    except (UserError, OSError, TypeError):
        return DEFAULT


def _recipe_of_run(name: str) -> str | None:
    try:  # an empty name would be the empty MLflow id of a run that is not recorded
        return named_run(load_settings(), name, "").config.recipe if name else None
    except UserError:  # no name: the next flag, or nothing
        return None


def add_flag(
    group: "argparse._ActionsContainer", name: str, kind: Any, sentence: str, note: str = ""
) -> None:
    """Add the flag of a config's field. kind: its type, which says what a value looks like."""
    # No `type`: pydantic reads the text by the same bounds, and with the same words, as in a file.
    # SUPPRESS: only what was given is in the namespace, or these defaults would overrule a file's values.
    group.add_argument(
        f"--{name.replace('_', '-')}",
        dest=f"config.{name}",
        default=argparse.SUPPRESS,
        metavar={int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT"),
        help=f"{sentence}{choices_text(kind)}{note}".replace("%", "%%"),
    )


def add_config_flags(parser: Parser) -> None:
    """Add one flag a field of the config of the parser's recipe (`--train.batch-size N`), grouped by section,
    and `--config FILE`."""
    recipe = parser.recipe
    # For --resume without a name: the newest run of this recipe.
    parser.set_defaults(meant=recipe)
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
    """Return a field's choices for people, ` [auto, yes, no]`; nothing where any value will do."""
    return f" [{', '.join(map(str, get_args(kind)))}]" if get_origin(kind) is Literal else ""


def overrides_from_args(args: argparse.Namespace) -> list[str]:
    """Return the flags that were given as override texts."""
    given = {key: value for key, value in vars(args).items() if key.startswith("config.")}
    return [f"{key.removeprefix('config.')}={value}" for key, value in given.items()]


def add_train_flags(parser: Parser) -> None:
    """Add the flags of a training command: the config's, and those of the run."""
    add = parser.add_argument
    resume = "go on with a run (name or MLflow id) and its values; alone: the newest of this recipe"
    add("--resume", nargs="?", const="latest", metavar="RUN", help=resume)
    name = "name of the run and its folder (default: recipe, devices, time)"
    add("--run-name", metavar="NAME", help=name)
    add("--report", type=Path, metavar="FILE", help="write the run's report as JSON")
    profile = "steps to record with torch's profiler, such as 20-24 (opens in Perfetto)"
    add("--profile", metavar="FIRST-LAST", help=profile)
    add_experiment_flags(parser)


def add_experiment_flags(parser: Parser) -> None:
    """Add the config's flags, and where it is recorded: all that a command needs which makes several runs, or
    names them itself."""
    parser.set_defaults(resume=None, report=None, profile=None)
    tracking = "MLflow server or database; none: record nothing (default: DPHYBRID_TRACKING_URI)"
    parser.add_argument("--tracking", metavar="URI", help=tracking)
    add_config_flags(parser)


def config_from_args(args: argparse.Namespace) -> tuple[ExperimentConfig, Settings]:
    """Return config and settings; `args.resume` becomes the name of the run that it means. Raises
    UserError."""
    if args.report is not None:
        check_target(args.report, f"--report {args.report}")
    for name, value in (("DPHYBRID_TRACKING_URI", args.tracking), ("DPHYBRID_PROFILE", args.profile)):
        if value is not None:
            os.environ[name] = value  # a setting: the flow's tasks read it, too
    settings, base = load_settings(), None
    if args.resume is not None:
        run = named_run(settings, args.resume, args.meant)
        args.resume, base = run.folder.name, run.config
    return data_config(args, base), settings


def given_config(args: argparse.Namespace, base: ExperimentConfig | None = None) -> ExperimentConfig:
    """Return the experiment that a command line gives; `base` as in `load_config`. Raises UserError."""
    return load_config(args.config, overrides_from_args(args), base)


def check_data_path(path: str) -> None:
    """Raise UserError where `path` names no file. The readers do too, seconds later: they import polars."""
    plain = not any(sign in path for sign in "*?[")
    if path and plain and not given_path(path, "data.path").exists():
        raise UserError(f"data.path={path}: there is no such file")


def data_config(args: argparse.Namespace, base: ExperimentConfig | None = None) -> ExperimentConfig:
    """Return `given_config`. Raises UserError too where a built-in recipe's data is not there, and where a
    table cannot be opened: before torch is imported, which takes seconds."""
    config = given_config(args, base)
    if config.recipe in BUILT_IN:
        check_data_path(str(config.data.model_dump().get("path") or ""))
        recipe = find_recipe(config.recipe)
        if recipe.tabular:
            recipe.source(config.data, config.train.seed)
    return config
