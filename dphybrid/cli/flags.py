"""Command-line flags: one for each field of the recipe's config, and those of a run."""

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dphybrid.cli.parser import Parser, field_of
from dphybrid.config import ExperimentConfig, merge
from dphybrid.config.settings import Settings, load_settings
from dphybrid.config.tables import READING_FIELDS, TableDataConfig
from dphybrid.recipes.configs import field_types, load_config, parse_overrides, read_config_file
from dphybrid.recipes.registry import BUILT_IN, DEFAULT, find_recipe, infer_recipe, recipe_names
from dphybrid.run.folder import named_run
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, given_path
from dphybrid.util.text import masked


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
    except (UserError, OSError, TypeError):
        return DEFAULT


def _recipe_of_run(name: str) -> str | None:
    try:  # an empty name would be the empty MLflow id of a run that is not recorded
        return named_run(load_settings(), name, "").config.recipe if name else None
    except UserError:  # no name: the next flag, or nothing
        return None


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


def _add_flag(
    group: "argparse._ActionsContainer", name: str, kind: Any, sentence: str, note: str = ""
) -> None:
    """Add the flag of a config's field. kind: its type, which says what a value looks like."""
    group.add_argument(
        f"--{name.replace('_', '-')}",
        dest=f"config.{name}",
        default=argparse.SUPPRESS,
        metavar={int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT"),
        help=f"{sentence}{choices_text(kind)}{note}".replace("%", "%%"),
    )


def add_config_flags(parser: argparse.ArgumentParser, recipe: str | None = None) -> None:
    """Add one flag a field of the config (`--train.batch-size N`), grouped by section, and `--config FILE`.

    recipe: whose fields; None for the parser's own.
    """
    if isinstance(parser, Parser):
        recipe = parser.recipe = recipe or parser.recipe
    recipe = recipe or DEFAULT
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
        _add_flag(groups[section], name, kind, sentence, note)


def add_reading_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how new files are written, where not as those of training."""
    for name in READING_FIELDS:
        field = TableDataConfig.model_fields[name]
        _add_flag(parser, f"data.{name}", field.annotation, f"{field.description} (as in training)")


def reading_from_args(args: argparse.Namespace) -> dict[str, str]:
    """Return what was given of `add_reading_flags`, by field of the data section."""
    prefix = "config.data."
    return {key.removeprefix(prefix): value for key, value in vars(args).items() if key.startswith(prefix)}


def choices_text(kind: object) -> str:
    """Return a field's choices for people, ` [auto, yes, no]`; nothing where any value will do."""
    return f" [{', '.join(map(str, get_args(kind)))}]" if get_origin(kind) is Literal else ""


def overrides_from_args(args: argparse.Namespace) -> list[str]:
    """Return the flags that were given as override texts."""
    return [
        f"{key.removeprefix('config.')}={value}"
        for key, value in vars(args).items()
        if key.startswith("config.")
    ]


def add_train_flags(parser: argparse.ArgumentParser, recipe: str | None = None) -> None:
    """Add the flags of a training command: the config's, and those of the run."""
    add = parser.add_argument
    resume = "go on with a run (name or MLflow id) and its values; alone: the newest of this recipe"
    add("--resume", nargs="?", const="latest", metavar="RUN", help=resume)
    name = "name of the run and its folder (default: recipe, devices, time)"
    add("--run-name", metavar="NAME", help=name)
    add("--report", type=Path, metavar="FILE", help="write the run's report as JSON")
    profile = "steps to record with torch's profiler, such as 20-24 (opens in Perfetto)"
    add("--profile", metavar="FIRST-LAST", help=profile)
    add_experiment_flags(parser, recipe)


def add_experiment_flags(parser: argparse.ArgumentParser, recipe: str | None = None) -> None:
    """Add the config's flags, and where it is recorded: all that a command needs which makes several runs, or
    names them itself."""
    parser.set_defaults(**{name: parser.get_default(name) for name in ("resume", "report", "profile")})
    tracking = "MLflow server or database; none: record nothing (default: DPHYBRID_TRACKING_URI)"
    parser.add_argument("--tracking", metavar="URI", help=tracking)
    add_config_flags(parser, recipe)


def config_from_args(args: argparse.Namespace) -> tuple[ExperimentConfig, Settings, str | None, Path | None]:
    """Return (config, settings, resume, report path). Raises UserError."""
    report: Path | None = args.report
    if report is not None:
        check_target(report, f"--report {report}")
    for name, value in (("DPHYBRID_TRACKING_URI", args.tracking), ("DPHYBRID_PROFILE", args.profile)):
        if value is not None:
            os.environ[name] = value  # a setting: the flow's tasks read it, too
    settings = load_settings()
    run = None if args.resume is None else named_run(settings, args.resume, args.meant)
    return data_config(args, run.config if run else None), settings, run.folder.name if run else None, report


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


def tags_from_args(args: argparse.Namespace) -> dict[str, str]:
    """Return the tags that were given. Raises UserError for one without a value."""
    tags = {}
    for text in args.tag:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--tag {text}: write NAME=VALUE")
        tags[name] = masked(value)
    return tags
